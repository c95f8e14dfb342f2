"""Arguments on the command line: what was typed and what is expected is said of each."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import load_config
from engine.types.errors import ConfigError
from server import cli
from server.foreign_flags import ADVICE, SETTINGS


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


FLAGS = [flag for flags in (*SETTINGS.values(), *ADVICE.values()) for flag in flags.split()]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == ConfigError.exit_code
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_another_server_is_answered_with_what_stands_in_its_place(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    said = _refused(capsys, "serve", "model.gguf", flag, "1")
    assert said.startswith(f"callboard: {flag}: ")
    assert said.count("\n") == 1
    for key in re.findall(r"--set ([\w.]+)=", said):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [f"{key}=[]"], {})
        assert "unknown" not in str(refused.value)


def test_each_flag_of_another_server_has_one_answer() -> None:
    assert len(FLAGS) == len(set(FLAGS)) > 60


def test_the_value_of_another_servers_flag_is_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, setting in {
        ("serve", "x", "--tensor-parallel-size", "2"): "device.tensor_parallel=2 ",
        ("serve", "--tensor-parallel-size", "2", "x"): "device.tensor_parallel=2 ",
        ("serve", "x", "--max-model-len=4096"): "model.max_model_len=4096 ",
        ("serve", "x", "--served-model-name", "a b"): "model.name='a b' ",
        ("serve", "x", "--enforce-eager", "--seed"): "graphs.mode=off ",
        ("serve", "x", "--seed", "--enforce-eager"): "device.seed=VALUE ",
        ("generate", "x", "--dtype", "half"): "model.dtype=half ",
    }.items():
        assert f"--set {setting}" in _refused(capsys, *arguments)


def test_a_flag_that_no_server_has_is_named_beside_those_that_others_have(capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, "serve", "x", "--tp", "2", "--froo", "3").splitlines()
    assert said[0].startswith("callboard: --tp: ")
    assert said[-1].endswith("unrecognized arguments: --froo")
    assert _refused(capsys, "serve", "x", "y").endswith("unrecognized arguments: y\n")
