"""What a start would find on this machine, without loading anything: for listing what could run.

Owns: that look ahead.  Does not know: plugins' names, printing.
"""

from pathlib import Path

from engine.config import Config
from engine.errors import WeightsError
from engine.execution.device import choose_device, choose_dtype
from engine.models.checkpoint import DEMO, ModelSpec, read_spec, resolve_checkpoint
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.selection import expected_context


def preview_context(config: Config) -> AttentionContext:
    """What attention plugins would be told.  A model that would have to be downloaded is left out.

    Raises ConfigError if the device that the configuration asks for is not here."""
    device = choose_device(config.device, 0)
    spec = _spec_at_hand(config.model.path)
    if spec is None:
        return expected_context(config, None, device=device.type)
    dtype = str(choose_dtype(config.model.dtype, device, spec.dtype)).removeprefix("torch.")
    return expected_context(config, spec.shape, device=device.type, dtype=dtype)


def _spec_at_hand(path: str) -> ModelSpec | None:
    if path != DEMO and not Path(path).expanduser().is_dir():
        return None
    try:
        return read_spec(resolve_checkpoint(path, ""))
    except WeightsError:
        return None
