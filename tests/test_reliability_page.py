"""docs/reliability.md: its table is what ``make reliability`` measured, and the tests it names are there.

``python -m tests.test_reliability_page`` writes the table.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "reliability_2core_cpu.json"
HEADING = "## What was measured\n"
# Process faults and HTTP: every one of them has a test.
REQUIRED = [*(f"P{number}" for number in range(1, 16)), *(f"H{number}" for number in range(1, 11))]


def render() -> str:
    """The section below the heading."""
    report = json.loads(RESULTS.read_text())
    machine = report["machine"]
    lines = [
        HEADING,
        f"By `make reliability` on {machine['cores']} cores of {machine['processor']}; the worst case of each row.",
        "P: processes. H: HTTP. U: properties. G: what is searched for in the source.",
        *([f"Note: {report['note']}."] if "note" in report else []),
        "",
        "| | what is done | figure | worst | bound | |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        value = f"{row['value']:.3g} {row['unit']}".strip() if "value" in row else ""
        cells = (row["id"], row["injected"], row.get("figure", ""), value, row.get("bound", ""), row["verdict"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def marks() -> set[tuple[str, str]]:
    """(id, what is done) of every mark in the tests."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.reliability":
                found.add(tuple(ast.literal_eval(argument) for argument in node.args))
    return found


def test_every_fault_has_a_test() -> None:
    shown = {number for number, _ in marks()}
    assert [number for number in REQUIRED if number not in shown] == []


def test_the_table_is_what_was_measured() -> None:
    _, heading, table = PAGE.read_text().partition(HEADING)
    assert heading + table == render(), "run python -m tests.test_reliability_page"


def test_what_was_measured_is_still_tested_and_holds_or_says_so() -> None:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    assert {(row["id"], row["injected"]) for row in rows} <= marks(), "run make reliability"
    assert {row["id"] for row in rows} >= set(REQUIRED), "run make reliability"
    assert not [row for row in rows if row["verdict"] == "FAILED"]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|engine|server)/[\w/.]+)`", PAGE.read_text()))))
def test_what_the_page_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEADING)[0] + render())
