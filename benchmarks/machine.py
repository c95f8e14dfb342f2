"""What the scripts here have alike: their parser, and the file that keeps what one has measured.

Owns: --output.  Does not know: what is measured, what is said of the machine: that is as ``callboard bench`` says it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from server.extensions.bench.machine import describe_machine


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's parser.  doc: what the script says of itself."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "also write the figures and the machine to this file, as JSON"
    parser.add_argument("--output", "--json", dest="output", type=Path, metavar="FILE", help=words)
    return parser


def keep(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures to a script's --output, if it was given one."""
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine(), **figures}, indent=1) + "\n")
