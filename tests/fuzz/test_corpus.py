"""Every input of the corpus gives a value or the error that is documented; ``make fuzz`` looks for more of them."""

import pytest

from tests.fuzz.target import CORPUS, TARGETS, target

MOST_BYTES = 8192


@pytest.mark.parametrize("name", TARGETS)
def test_foreign_bytes_give_a_value_or_our_error(name: str) -> None:
    paths = sorted((CORPUS / name).iterdir())
    assert len(paths) >= 3
    with target(name) as read:
        for path in paths:
            data = path.read_bytes()
            assert len(data) <= MOST_BYTES, "the corpus is of small files"
            try:
                read(data)
            except Exception as error:
                raise AssertionError(f"{path}: {error!r}") from error


def test_every_folder_of_the_corpus_has_a_target() -> None:
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)
