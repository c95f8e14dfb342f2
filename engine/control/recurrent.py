"""The settings that do not work with recurrent layers yet.

Owns: their refusal, before weights are loaded.  Does not know: models without recurrent layers, what a state is.
"""

from collections.abc import Mapping

from engine.config import Config
from engine.plugins.kinds import PROPOSER
from engine.types.errors import ConfigError

NOT_SERVED = "compiled"


def check_recurrent(config: Config, names: Mapping[str, object]) -> None:
    """Raise ConfigError for a setting under which a model with recurrent layers would give wrong results or fail.

    names: kind of plugin -> the chosen one."""
    kv, ranks, mode = config.kv, config.device.tensor_parallel, config.graphs.mode
    host_pages = getattr(kv, "num_host_pages", 0)  # of an optional folder
    faults = {
        f"device.tensor_parallel={ranks}: the states of recurrent layers are not divided among ranks; set it to 1": (
            ranks > 1
        ),
        f"graphs.mode={mode}: no compiler takes recurrent layers; set it to 'auto'": mode == NOT_SERVED,
        f"kv.num_host_pages={host_pages}: pages return without the states of recurrent layers; set it to 0": (
            host_pages > 0
        ),
        f"plugins.{PROPOSER}={names.get(PROPOSER)}: a rejected token would stay in the states of recurrent layers; set "
        "it to 'none'": PROPOSER in names,
    }
    for fault, found in faults.items():
        if found:
            raise ConfigError(fault)
