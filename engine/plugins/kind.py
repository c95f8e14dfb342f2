"""A kind of plugin.

Owns: what is known of a kind before a plugin of it is imported.  Does not know: the kinds.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin.  Its plugins are named '<kind>.<name>', also in [plugins.options].

    hook: builds a plugin.  built_in: the plugins that come with callboard, each a module of engine.plugins.<kind>.
    setting: the key of [plugins] that names plugins; options change at run time if and as it does.
    several: any number of plugins may be chosen.  by_model: the model's files decide if the setting does not.
    decides: the plugins affect plans of the scheduler.  moves_pages: they read and write pages while steps run.
    default: the plugin for 'auto'; '' if more than the configuration decides.  because: the reason, for the log.
    """

    name: str
    hook: str
    built_in: tuple[str, ...]
    setting: str
    several: bool = False
    by_model: bool = False
    decides: bool = False
    moves_pages: bool = False
    default: str = ""
    because: str = ""


def new_kind(name: str, hook: str, built_in: str, setting: str = "", **more: Any) -> Kind:
    """Return a kind.  hook: without its prefix.  built_in: names with blanks between them."""
    return Kind(name, f"callboard_{hook}", tuple(built_in.split()), setting or name, **more)
