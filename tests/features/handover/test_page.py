"""The diagrams of docs/handover.md are those of the tables that the protocol follows."""

import re
from pathlib import Path

import pytest

from engine.features.handover.states import BORROWING, LENDING, Borrowing, Lending, diagram

PAGE = Path(__file__).parents[3] / "docs" / "handover.md"
TABLES = {"borrowing": diagram(BORROWING), "lending": diagram(LENDING)}


def place(name: str) -> re.Pattern[str]:
    """The part of the page that is made."""
    return re.compile(rf"(?<=<!-- made: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


def made(name: str) -> str:
    """The part as the tables say."""
    return f"\n```mermaid\n{TABLES[name]}\n```\n\n"


@pytest.mark.parametrize("name", TABLES)
def test_a_diagram_is_as_the_table_is(name: str) -> None:
    found = place(name).search(PAGE.read_text())
    assert found is not None
    assert found[0] == made(name), "run python -m tests.features.handover.test_page"


def test_every_state_is_reached_and_left_or_an_end() -> None:
    for states, table in ((Borrowing, BORROWING), (Lending, LENDING)):
        first, *others = states
        assert set(table.values()) | {first} == {*states}
        assert {before for before, _ in table} <= {*states}
        assert others


if __name__ == "__main__":
    text = PAGE.read_text()
    for one in TABLES:
        text = place(one).sub(lambda _, one=one: made(one), text)  # type: ignore[misc]
    PAGE.write_text(text)
