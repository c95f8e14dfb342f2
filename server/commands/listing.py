"""The commands that print what a configuration comes to here: its settings, plugins, and a race of attention backends.

Owns: what is printed.  Does not know: how any of it is found.
torch is imported only by those that look at the device.
"""

import argparse
import json

from rich.console import Console

from engine.config import Config, json_schema, render_toml
from engine.plugins.hookspecs import API_VERSION
from engine.plugins.listing import list_plugins
from engine.types.errors import PluginError


def config(parsed: argparse.Namespace, config: Config) -> None:
    print(json.dumps(json_schema(), indent=2) if parsed.schema else render_toml(config), end="\n")


def plugins(parsed: argparse.Namespace, config: Config) -> None:
    from engine.startup.preview import preview_context, preview_template  # torch knows the device

    context = preview_context(config)
    console = Console(highlight=False, markup=False)
    for row in list_plugins(config, context, preview_template(config)):
        mark = {"": " ", "yes": "*"}.get(row.chosen, "?")
        origin = "" if row.info.built_in else f" ({row.info.distribution} {row.info.version})"
        console.print(f"{mark} {row.info.name}{origin}", style="bold" if row.chosen else "", soft_wrap=True, end="")
        chosen = f" [{row.chosen}]" if row.chosen not in ("", "yes") else ""
        reason = "; ".join(row.hindrances)
        console.print(f"{chosen}  {'cannot run here: ' + reason if reason else row.needs}", style="dim", soft_wrap=True)
    console.print("\n* chosen · ? chosen for what the brackets say")
    model = f"heads of {context.head_size}" if context.head_size else "a model that is not on this machine"
    machine = f"{context.device}, {context.dtype or 'any dtype'}, pages of {context.page_size}, {model}"
    console.print(f"here: {machine}; plugin API {API_VERSION}")


def tune(parsed: argparse.Namespace, config: Config) -> None:
    from engine.startup.race import race_for

    report = race_for(config).run()
    Console().print(report.table())
    if not report.fastest():
        raise PluginError("no attention backend came through; the table says why")
