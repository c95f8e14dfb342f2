"""The arguments of ``callboard doctor``."""

import argparse

from server.arguments import add_command, shared_arguments, target_argument


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    run, words = "server.extensions.doctor.doctor:show", "look for what a start lacks, and how to get it"
    command = add_command(commands, "doctor", run, words, target_argument(), shared_arguments("warning"))
    command.add_argument("--gpu", action="store_true", help="test the GPUs instead: kernels, graphs, collectives")
