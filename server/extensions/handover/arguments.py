"""The arguments of ``callboard serve`` for a split engine."""

import argparse

from server.arguments import count


def add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    prefill = "serve N engines that compute prompts, which --decode engines answer, behind one router on this machine"
    serve.add_argument("--prefill", type=count, metavar="N", help=prefill)
    serve.add_argument("--decode", type=count, metavar="N", help="number of engines that answer (default: 1)")
