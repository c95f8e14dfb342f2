"""Decoding a plugin's own option table: unknown keys and wrong types are errors that name the plugin.

Owns: the wording of those errors.  Does not know: the options; each plugin defines a struct.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.types.errors import PluginError

T = TypeVar("T", bound="Options")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of option structs; used directly by a plugin without options."""


def decode_options(plugin: str, table: Mapping[str, Any], kind: type[T]) -> T:
    """Convert ``table`` to ``kind``.  plugin: '<kind>.<name>', for the error.  Raises PluginError."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise PluginError(f"[plugins.options.'{plugin}']: {error}; options: {known}") from None
