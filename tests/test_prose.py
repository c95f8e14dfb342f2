"""The sentences of the product and its documentation have no words or openings that CONTRIBUTING.md rules out."""

from tests.prose import TREES, findings, of_markdown, of_python

# A list of common words that a load is made of; another list would be another load.
DATA = "server/extensions/bench/loads.py"


def test_the_reader_finds_what_is_ruled_out() -> None:
    assert of_python('"""Of its worker."""') == [(1, "a docstring that begins 'Of its worker.'")]
    assert of_python('def f():\n    """path: a file."""') == [(2, "a docstring that begins 'path: a file.'")]
    assert of_python("x = 1  # nobody reads it") == [(1, "the word 'nobody'")]
    assert of_python('log("rows whoever holds them")') == [(1, "the word 'whoever'")]
    assert of_python('"""Return the pages of a row."""') == []
    assert of_markdown("Who reads it\n```\nwho\n```\n`who`") == [(1, "the word 'Who'")]


def test_no_file_has_any() -> None:
    assert [one for one in findings(list(TREES)) if not one.startswith(DATA)] == []
