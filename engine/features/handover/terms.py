"""The options of the configured carrier that hand-overs read.

Owns: how they are found.  Does not know: the rest of a carrier's options.
"""

from engine.config import Config
from engine.plugins.kinds import chosen_plugins
from engine.plugins.options import decode_options
from engine.plugins.transfer.kind import TRANSFER
from engine.plugins.transfer.options import CarrierOptions


def terms_of(config: Config) -> CarrierOptions | None:
    """Return the options; None if no carrier is configured.  Raises PluginError."""
    carrier = chosen_plugins(config).get(TRANSFER)
    if carrier is None:
        return None
    name = f"{TRANSFER}.{carrier}"
    given = config.plugins.options.get(name, {})
    known = {field: given[field] for field in CarrierOptions.__struct_fields__ if field in given}
    return decode_options(name, known, CarrierOptions)
