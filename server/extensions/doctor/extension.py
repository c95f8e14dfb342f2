"""``callboard doctor`` as a part of the command."""

import argparse
import sys

from engine.config import Config
from engine.types.errors import ConfigError
from server.arguments import add_command, shared_arguments, target_argument
from server.run.extension import Extension


class DoctorExtension(Extension):
    """``callboard doctor``."""

    def add_commands(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        words = "look for what a start lacks, and how to get it"
        command = add_command(commands, "doctor", _doctor, words, target_argument(), shared_arguments("warning"))
        command.add_argument("--gpu", action="store_true", help="test the GPUs instead: kernels, graphs, collectives")


def _doctor(parsed: argparse.Namespace, config: Config) -> None:
    from server.extensions.doctor.doctor import show

    if not show(config, gpu=parsed.gpu):
        sys.exit(ConfigError.exit_code)


EXTENSION = DoctorExtension()
