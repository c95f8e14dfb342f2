"""The command's help imports the arguments of subcommands alone, and each names a function that is there."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pkgutil import resolve_name

import pytest

from server.cli import _parser

SHOW = """
import sys
from server.cli import main

try:
    main({arguments})
except SystemExit as ended:
    assert not ended.code
print(*sys.modules, file=sys.stderr)
"""
# What the check of the standard library's names leaves out.
OF_PYTHON = {"__main__", "sitecustomize", "usercustomize"}
MODULES = {
    "engine", "engine.types", "engine.types.errors", "server", "server.arguments", "server.cli", "server.extensions",
    "server.run", "server.run.folders",
}  # fmt: skip


def imported(*arguments: str) -> set[str]:
    """The modules that a process has when the command has ended."""
    code = SHOW.format(arguments=list(arguments))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


def _runs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _runs(command)
    if isinstance(run := parser.get_default("run"), str):
        yield parser.prog, run


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("doctor", "--help"), ("serve", "--help")], ids=" ".join
)
def test_the_help_imports_no_more_than_arguments(arguments: tuple[str, ...]) -> None:
    modules = imported(*arguments)
    others = {one.partition(".")[0] for one in modules} - sys.stdlib_module_names - OF_PYTHON
    assert {"engine", "server"} <= others
    assert {one for one in others if not one.startswith("_")} == {"engine", "server"}, others
    ours = {one for one in modules if one.partition(".")[0] in ("engine", "server")}
    extensions = {one for one in ours if one.startswith("server.extensions.")}
    assert ours - extensions == MODULES
    assert {one.split(".")[3] for one in extensions if one.count(".") > 2} == {"arguments"}


def test_the_list_of_models_imports_no_http_no_arrays_and_no_templates() -> None:
    tops = {one.partition(".")[0] for one in imported("models")}
    assert "msgspec" in tops
    assert not tops & {"aiohttp", "jinja2", "numpy", "torch", "transformers", "uvloop"}


def test_every_subcommand_names_a_function() -> None:
    runs = dict(_runs(_parser()))
    assert len(runs) > 10
    assert {"callboard serve", "callboard doctor", "callboard bench offline"} <= set(runs)
    for run in runs.values():
        assert callable(resolve_name(run)), run
