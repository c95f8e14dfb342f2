"""What a start would find on this machine, without loading anything: for listing what could run.

Owns: that look ahead.  Does not know: plugins' names, printing.
"""

from pathlib import Path

import torch

from engine.checkpoints.checkpoint import DEMO, ModelSpec, read_spec, resolve_checkpoint
from engine.config import Config
from engine.errors import WeightsError
from engine.execution.device import choose_device, choose_dtype, free_bytes
from engine.models.decoder import Decoder
from engine.models.loader import loading_bytes
from engine.plugins.comm.local import LocalComm
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.selection import expected_context
from engine.startup.memory import check_weights


def preview_context(config: Config) -> AttentionContext:
    """What attention plugins would be told.  A model that would have to be downloaded is left out.

    Raises ConfigError if the device that the configuration asks for is not here."""
    device = choose_device(config.device, 0)
    spec = _spec_at_hand(config.model.path)
    if spec is None:
        return expected_context(config, None, device=device.type)
    dtype = str(choose_dtype(config.model.dtype, device, spec.dtype)).removeprefix("torch.")
    return expected_context(config, spec.shape, device=device.type, dtype=dtype)


def preview_weights(config: Config, spec: ModelSpec) -> tuple[int, int]:
    """Bytes that loading a rank's weights takes, and that there are for it if all ranks are on this machine.

    Raises ConfigError, as a start would, if they do not fit, ranks cannot share them or the device is not here."""
    device = choose_device(config.device, 0)
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    ranks = config.device.tensor_parallel
    plan = Decoder(spec.shape, _FirstOf(ranks), torch.device("meta"), dtype)
    needed, available = loading_bytes(plan, device, config.model.load_format), free_bytes(device)
    if device.type == "cpu":
        available //= ranks
    check_weights(spec, needed, dtype, available, ranks)
    return needed, available


class _FirstOf(LocalComm):
    """The first rank of several, which never calls the others: what it holds is known without them."""

    def __init__(self, size: int) -> None:
        self.size = size


def _spec_at_hand(path: str) -> ModelSpec | None:
    if path != DEMO and not Path(path).expanduser().is_dir():
        return None
    try:
        return read_spec(resolve_checkpoint(path, ""))
    except WeightsError:
        return None
