"""docs/tour.md: the core is an afternoon's reading and imports nothing around it; README says how large both are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = re.findall(r"^\d+\. \[(engine/[\w/]+\.py)\]\(\.\./\1\)", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
WINGS = ("engine.graphs", "engine.kernels", "engine.workers", "server")
MOST_LINES = 2887
# Names of optional parts, which lie in folders of ``engine/features``.
OPTIONAL = re.compile(
    r"lora|adapter|speculat|draft|propos|eagle|kv_?store|the store|fetch|host_?tier|host_page|on_host|pooling|pooled|"
    r"grammar|timelines|recorder|quarantine|suspect|culprit",
    re.IGNORECASE,
)
ROUGHLY = 0.15


def num_lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_tour_has_fourteen_files_and_is_an_afternoon() -> None:
    assert len(set(TOUR)) == len(TOUR) == 14
    assert num_lines(*(ROOT / path for path in TOUR)) <= MOST_LINES


def test_no_line_of_the_core_names_an_optional_part() -> None:
    named = [
        f"{path}:{number}: {line.strip()}"
        for path in TOUR
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if OPTIONAL.search(line)
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("path", TOUR)
def test_the_core_imports_no_wing(path: str) -> None:
    modules = {
        module
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        for module in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert [module for module in modules if module.startswith(WINGS)] == []


def test_the_readme_says_how_large_it_is() -> None:
    told = dict(re.findall(r"`(engine|server|tests)/`\s+has\s+([\d,]+\d)", (ROOT / "README.md").read_text()))
    assert set(told) == {"engine", "server", "tests"}
    for folder, number in told.items():
        counted = num_lines(*(ROOT / folder).rglob("*.py"))
        assert abs(int(number.replace(",", "")) - counted) <= ROUGHLY * counted, f"{folder}/ has {counted} lines"
