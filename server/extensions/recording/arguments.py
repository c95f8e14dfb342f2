"""The arguments of ``callboard replay``."""

import argparse
from pathlib import Path

from server.arguments import add_command, count, log_arguments, natural, positive

DESCRIPTION = """\
Step the real scheduler through a recording, without weights, GPU or clients, in this process: every plan with its
reason, every invariant after every turn, and whether the plans are the recorded ones, byte for byte.
"""
EPILOG = """\
examples:
  callboard replay incident.cbr                      every turn: what came, what was planned, and why
  callboard replay incident.cbr --last 20            the same, of the last 20 turns only
  callboard replay incident.cbr --quiet              one line: the digest of all plans, and whether all holds
  callboard replay incident.cbr --shrink small.cbr   leave out operations while it still fails the same way

Recordings are written to the folder recordings/ of storage.folder when executors are lost, when the engine dies, when
a step or a request waits too long or pages are lost; on SIGUSR2, and by POST /debug/recording.  docs/operations.md has
the details, and what a recording holds of prompts.
Exit codes: 0 all holds and all plans are the recorded ones, 1 something failed or differs, 2 no such file or recording,
5 the file was cut or damaged: what there is of it holds.
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    run = "server.extensions.recording.replay:replay"
    parser = add_command(commands, "replay", run, "step through a recording of the scheduler", log_arguments("warning"))
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="a recording, FILE.cbr")
    parser.add_argument("--quiet", action="store_true", help="only the last lines: the digest and what failed")
    parser.add_argument("--last", type=natural, metavar="N", help="show only the last N turns")
    parser.add_argument(
        "--shrink", type=Path, metavar="SMALL.cbr", help="write a shorter recording that fails the same way"
    )
    parser.add_argument("--limit", type=positive, default=60.0, metavar="S", help="seconds for --shrink (default: 60)")
    parser.add_argument(
        "--check-every", type=count, default=1, metavar="N", help="turns between two looks at all books (default: 1)"
    )
