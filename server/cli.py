"""The ``callboard`` command: its arguments, and those of each subcommand.

Owns: arguments, exit codes.  Does not know: what a subcommand runs; that is imported when the arguments are read.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import NoReturn

from engine import __version__
from engine.types.errors import CallboardError, ConfigError
from server.arguments import add_command, count, log_arguments, natural, real, shared_arguments, target_argument
from server.run.folders import modules_named

SERVE = "server.commands.serve:run"
TALKING = "server.commands.talking"
LISTINGS = {
    "config": ("listing", "print the effective configuration as TOML"),
    "plugins": ("listing", "list the plugins that can be chosen"),
    "models": ("models", "say how a checkpoint is served, or list the architectures that can be"),
    "tune": (
        "listing",
        "measure the attention backends that can run here on the model's heads, for later starts to choose by",
    ),
}
EPILOG = """\
examples:
  callboard serve Qwen/Qwen3-0.6B
  callboard serve examples/demo.toml --port 8001 --set kv.page_size=64
  callboard generate "def fibonacci(n):" --max-tokens 64 --temperature 0
  callboard chat path/to/checkpoint
  callboard config > callboard.toml

MODEL_OR_FILE is a model (a directory, a .gguf file, or org/name on the hub) or a configuration (a .toml file, which
may be given beside --model).  Settings come from the file, then CALLBOARD_SECTION__KEY variables, then --model, --set.
Exit codes: 0 done, 1 engine failed, 2 configuration, 3 checkpoint, 4 graphs, 98 port in use, 130 interrupted.
"""
APPLY_DESCRIPTION = """\
Gives a server that runs another configuration, under its streams.  The file is a whole configuration: what it leaves
out goes back to its default.  Settings of the server's own command line and environment stay above it.  What names a
place (model.path, folders, options of plugins) changes by the file that the server was started with alone: without
FILE.toml, the server reads that one again.
"""
APPLY_EPILOG = """\
examples:
  callboard apply new.toml --dry-run
  callboard apply new.toml --url http://other:8000 --key sk-...
  callboard apply --url http://other:8000

`callboard config FILE.toml` prints a whole configuration; docs/operations.md says what can change, and how.
Exit codes: 0 done, 1 no answer, or the server failed, 2 refused.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with the code that the error carries."""
    _fill_standard_streams()
    parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
    from engine.host.logs import LogSettings
    from server.commands.configuration import read_configuration

    LogSettings(logging.getLevelNamesMapping()[parsed.log_level.upper()], parsed.log_format).apply()
    try:
        resolve_name(parsed.run)(parsed, read_configuration(parsed))
        sys.stdout.flush()
    except CallboardError as error:
        print(f"callboard: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left (``callboard config | head``): there is nothing to report.
        _drop_output()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print("callboard: standard output: no space is left for it", file=sys.stderr)
        _drop_output()


def _drop_output() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns what the arguments say; exits for those that are none of the command's, with what replaces them here."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        from server.foreign_flags import answers

        known = answers(arguments)
        typed = [one.partition("=")[0] for one in unknown]
        for flag in (flag for flag in known if flag in typed):
            print(f"callboard: {flag}: {known[flag]}", file=sys.stderr)
        # An argument that begins with no dash may be the value of a flag.
        odd = [flag for flag in typed if flag.startswith("-") and flag not in known]
        if odd or not known:
            parser.error(f"unrecognized arguments: {' '.join(odd or unknown)}")
        sys.exit(ConfigError.exit_code)
    return parsed


def _fill_standard_streams() -> None:
    """Open a standard stream that is closed (``2>&-``) on nothing, so that no socket takes its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = sys.stdin or open(0), sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callboard",
        description="An LLM serving engine with an OpenAI-compatible HTTP API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"callboard {__version__}")
    parser.set_defaults(takes_arrays=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    extensions = modules_named("arguments")

    add = partial(add_command, commands)
    command = add("serve", SERVE, "serve a model over HTTP", target_argument(), shared_arguments("info"))
    command.set_defaults(takes_arrays=True)
    command.add_argument("--host", help="address to listen on (server.host)")
    command.add_argument("--port", type=natural, help="port to listen on (server.port); 0 takes any free one")
    for extension in extensions:
        if hasattr(extension, "add_serve_arguments"):
            extension.add_serve_arguments(command)
    _add_apply(commands)
    words = "complete a prompt and print the text"
    command = add("generate", f"{TALKING}:generate", words, shared_arguments("warning"), _sampling())
    command.add_argument("prompt", help="the text to go on from; - reads it from standard input")
    words = "talk to the model in the terminal"
    command = add("chat", f"{TALKING}:chat", words, target_argument(), shared_arguments("warning"), _sampling())
    command.add_argument("--system", help="instructions that open the conversation")
    for name, (module, words) in LISTINGS.items():
        command = add(name, f"server.commands.{module}:{name}", words, target_argument(), shared_arguments("warning"))
        if name == "config":
            command.add_argument("--schema", action="store_true", help="print its JSON Schema instead")
    for extension in extensions:
        if hasattr(extension, "add_commands"):
            extension.add_commands(commands)
    return parser


def _add_apply(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    words = "change the settings of a server that runs, under its streams; those that can be changed"
    command = add_command(commands, "apply", "server.operators.apply_command:apply", words, log_arguments("warning"))
    command.description, command.epilog = APPLY_DESCRIPTION, APPLY_EPILOG
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("target", nargs="?", metavar="FILE.toml", help="the settings that are to be")
    command.add_argument("--dry-run", action="store_true", help="only say what would change")
    command.add_argument("--url", help="the server's address (default: server.host and server.port of the file)")
    command.add_argument(
        "--key",
        help="key of an operator (default: server.operator_key, or on this machine its server's token)",
    )


def _sampling() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--max-tokens", type=count, default=256, help="most tokens to write (default: 256)")
    parent.add_argument("--temperature", type=real, help="0 takes the likeliest token (default: 0.7)")
    parent.add_argument("--top-p", type=real, help="nucleus sampling (default: off; chat: 0.95)")
    parent.add_argument("--min-p", type=real, help="least share of the likeliest token's (default: off; chat: 0.05)")
    parent.add_argument("--seed", type=natural, help="the same seed gives the same text")
    return parent


if __name__ == "__main__":
    main()
