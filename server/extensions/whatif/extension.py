"""``callboard whatif`` as a part of the command."""

import argparse

from server.extensions.whatif.command import add_whatif
from server.run.extension import Extension


class WhatifExtension(Extension):
    """``callboard whatif``."""

    def add_commands(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        add_whatif(commands)


EXTENSION = WhatifExtension()
