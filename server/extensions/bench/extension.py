"""``callboard bench`` as a part of the command."""

import argparse

from server.arguments import shared_arguments, target_argument
from server.extensions.bench.command import add_bench
from server.run.extension import Extension


class BenchExtension(Extension):
    """``callboard bench``."""

    def add_commands(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        add_bench(commands, target_argument(), shared_arguments("warning"))


EXTENSION = BenchExtension()
