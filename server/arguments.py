"""Arguments of the command line: types whose refusals say what was typed, and the arguments that commands share.

Owns: both.  Does not know: commands, and what they run: a module and a function by their names, ``module:function``.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

N = TypeVar("N", int, float)


def _number(kind: Callable[[str], N], words: str, holds: Callable[[N], bool]) -> Callable[[str], N]:
    def read(text: str) -> N:
        try:
            if holds(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {words}, not '{text[:40]}'")

    return read


natural = _number(int, "a whole number from 0 on", lambda value: value >= 0)
count = _number(int, "a whole number from 1 on", lambda value: value >= 1)
real = _number(float, "a number", lambda value: abs(value) < float("inf"))
positive = _number(float, "a number above 0", lambda value: 0 < value < float("inf"))
share = _number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def picture(text: str) -> Path:
    """A file to draw to, before the work begins whose results are drawn."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'callboard[bench]'")
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder '{path.parent}'")
    return path


# The defaults of commands that read no configuration file, in place of the shared arguments.
NO_CONFIGURATION: dict[str, Any] = {
    "target": None, "model": None, "set": [], "log_level": "warning", "log_format": "text",
}  # fmt: skip


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: str,
    help_text: str,
    *parents: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """Add a subcommand; returns its parser.

    run: the function, ``module:function``.  parents: the arguments that it shares with others."""
    command = commands.add_parser(name, parents=[*parents], help=help_text)
    command.set_defaults(run=run, target=None, model=None, set=[])
    return command


# Built anew for every command: argparse shares a parent's options between its children, defaults included.


def shared_arguments(log_level: str) -> argparse.ArgumentParser:
    """Returns a parent parser with the arguments of commands that read a configuration."""
    parent = argparse.ArgumentParser(add_help=False, parents=[log_arguments(log_level)])
    parent.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting, e.g. kv.page_size=64; may be repeated",
    )
    parent.add_argument(
        "--model", metavar="MODEL_OR_FILE", help="a model or a file; a model may be named so beside a file"
    )
    return parent


def log_arguments(log_level: str) -> argparse.ArgumentParser:
    """Returns a parent parser with the arguments of logging."""
    parent = argparse.ArgumentParser(add_help=False)
    levels = ["debug", "info", "warning", "error"]
    parent.add_argument("--log-level", default=log_level, choices=levels, help=f"default: {log_level}")
    parent.add_argument("--log-format", default="text", choices=["text", "json"], help="default: text")
    return parent


def target_argument() -> argparse.ArgumentParser:
    """Returns a parent parser with the argument that names a model or a configuration."""
    parent = argparse.ArgumentParser(add_help=False)
    target = "a directory, a .gguf file or org/name, or a .toml file; without it, the demo model and every default"
    parent.add_argument("target", nargs="?", metavar="MODEL_OR_FILE", help=target)
    return parent
