"""The core can be read by itself: fourteen files, in the order of a request, that know none of the wings."""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "engine"
TOUR = (
    "messages",
    "actors/ingress",
    "actors/tokenizer",
    "actors/scheduler",
    "scheduling/planner",
    "scheduling/prefills",
    "scheduling/decodes",
    "scheduling/pages",
    "kv/radix",
    "actors/executor",
    "execution/runner",
    "execution/batch",
    "execution/rows",
    "models/decoder",
)
WINGS = ("engine.workers", "engine.processes", "engine.links", "engine.graphs", "engine.kernels", "server")
MOST_LINES = 3600


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return found | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("name", TOUR)
def test_a_file_of_the_core_imports_no_wing(name: str) -> None:
    imports = imports_of(ENGINE / f"{name}.py")
    assert not [one for one in imports if any(f"{one}.".startswith(f"{wing}.") for wing in WINGS)]


def test_the_core_stays_small() -> None:
    lines = {name: len((ENGINE / f"{name}.py").read_text().splitlines()) for name in TOUR}
    assert sum(lines.values()) <= MOST_LINES, lines
