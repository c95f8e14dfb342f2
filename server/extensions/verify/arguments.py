"""The arguments of ``callboard verify``."""

import argparse

from server.arguments import add_command, count, shared_arguments


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    run, words = "server.extensions.verify.verify:verify", "run requests in many ways: every bit must be the same"
    command = add_command(commands, "verify", run, words, shared_arguments("warning"))
    command.add_argument("subject", choices=["numerics"])
    command.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="how many (default: as many as run one after the other in 8 s, at least 10 and at most 200)",
    )
