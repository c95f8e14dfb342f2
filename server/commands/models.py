"""``callboard models``: how one checkpoint is served, or the architectures that can be.

Owns: what is printed.  Does not know: how either is found.
"""

import argparse
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from engine.checkpoints.checkpoint import DESCRIPTION, resolve_checkpoint
from engine.config import Config
from engine.plugins.families import THROUGH, list_families, read_model
from engine.plugins.verdict import how_served
from server.commands.configuration import is_configuration


def models(parsed: argparse.Namespace, config: Config) -> None:
    if any(one is not None and not is_configuration(one) for one in (parsed.target, parsed.model)):
        path = config.model.path
        spec = read_model(resolve_checkpoint(path, config.model.revision, DESCRIPTION), config.plugins, config.model)
        print(f"{path}: {spec.architecture} is served {how_served(spec)}")
        return
    table = Table("architecture", "family", "distribution", "is served")
    for row in list_families(config.plugins):
        served = "natively" if row.serves else f"once plugins.models names {row.info.short}"
        table.add_row(row.architecture, row.info.name, f"{row.info.distribution} {row.info.version}", served)
    missing = "" if find_spec("transformers") else ", if it is installed: pip install 'callboard[transformers]'"
    table.add_row("most other decoders", THROUGH, "callboard", f"through transformers{missing}")
    Console().print(table)
