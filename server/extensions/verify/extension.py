"""``callboard verify`` as a part of the command."""

import argparse

from engine.config import Config
from server.arguments import add_command, shared_arguments
from server.run.extension import Extension


class VerifyExtension(Extension):
    """``callboard verify numerics``."""

    def add_commands(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        words = "run requests in many ways: every bit must be the same"
        command = add_command(commands, "verify", _verify, words, shared_arguments("warning"))
        command.add_argument("subject", choices=["numerics"])


def _verify(parsed: argparse.Namespace, config: Config) -> None:
    from server.extensions.verify.verify import WAYS, verify_numerics

    verify_numerics(config, WAYS)


EXTENSION = VerifyExtension()
