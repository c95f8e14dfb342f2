"""The settings of a model with recurrent layers: those that do not work with it yet, and how many rows have room.

Owns: their refusal, before weights are loaded, and the default of ``scheduler.max_running``.
Does not know: models without recurrent layers, what a state is.
"""

import logging
import os

import msgspec

from engine.config import Config
from engine.host.device_defaults import gpu_bytes, runs_on_cpu
from engine.host.memory import available_bytes, resident_bytes
from engine.plugins.kinds import PROPOSER, chosen_plugins
from engine.types.errors import ConfigError

NOT_SERVED = "compiled"


log = logging.getLogger(__name__)

SHARE_OF_STATES = 4  # of memory beside weights one part; the others are for keys and values, and what else is there
LIKE_BEFORE = 8  # a number that differs by less than such a part: free memory is never the same twice


def states_per_row(config: Config) -> int:
    """Return how many states a running row may have: its own, one for the prefix cache, and with a proposer another."""
    return 2 + (PROPOSER in chosen_plugins(config))


def with_rows_for_states(config: Config, state_bytes: int, weight_bytes: int = 0, present: int = 0) -> Config:
    """Return a configuration of which the device has chosen the rows, with fewer if their states take too much memory.

    state_bytes: of one state.  What this process has counts as free, so that a change of settings under load finds the
    number of the start.  weight_bytes: of the checkpoint.
    present: rows of the engine that is to change, which stay where memory gives about as many; 0 for none."""
    rows = config.scheduler.max_running
    ranks = config.device.tensor_parallel
    memory = available_bytes() + resident_bytes(os.getpid()) if runs_on_cpu(config.device.kind) else gpu_bytes() * ranks
    times = states_per_row(config)
    most = max(1, max(0, memory - weight_bytes) // (SHARE_OF_STATES * times * state_bytes))
    if present <= rows and abs(most - present) <= present // LIKE_BEFORE:
        most = present
    if not memory or most >= rows:
        return config
    what = "auto: scheduler.max_running=%d, not %d (recurrent states take %d times %.1f MB for each row, of %.1f GB)"
    log.info(what, most, rows, times, state_bytes / 1e6, (memory - weight_bytes) / 1e9)
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, max_running=most))


def check_recurrent(config: Config) -> None:
    """Raise ConfigError for a setting under which a model with recurrent layers would be wrong, fail, or do nothing."""
    if (mode := config.graphs.mode) == NOT_SERVED:
        raise ConfigError(f"graphs.mode={mode}: no compiler takes recurrent layers; set it to 'auto'")
    if config.kv.page_size == 1 and (proposer := chosen_plugins(config).get(PROPOSER)):
        raise ConfigError(
            f"kv.page_size=1: plugins.proposer={proposer} proposes tokens up to the end of a page of a model with "
            "recurrent layers, and so none; set it to 4 or more, or the proposer to 'none'"
        )
