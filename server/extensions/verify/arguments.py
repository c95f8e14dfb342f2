"""The arguments of ``callboard verify``."""

import argparse

from server.arguments import add_command, shared_arguments


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    run, words = "server.extensions.verify.verify:verify", "run requests in many ways: every bit must be the same"
    add_command(commands, "verify", run, words, shared_arguments("warning")).add_argument(
        "subject", choices=["numerics"]
    )
