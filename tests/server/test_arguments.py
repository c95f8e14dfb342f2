"""Arguments on the command line: what was typed and what is expected is said of each."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import cli


def _typed(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                yield from _typed(command)
        elif action.type not in (None, Path):
            yield action


def test_every_argument_with_a_type_says_what_was_typed_and_what_is_expected() -> None:
    actions = list(_typed(cli._parser()))
    assert len(actions) > 15
    for action in actions:
        assert callable(action.type)
        if action.dest == "plot":
            continue  # any text may be a file's name
        with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a .*, not '\?!'$"):
            action.type("?!")
