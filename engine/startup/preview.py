"""A preview of a start on this machine, without loading anything: for listing what could run.

Owns: that look-up.  Does not know: plugins' names, printing.
"""

from pathlib import Path

import torch

from engine.checkpoints.checkpoint import ModelSpec, is_hub_id, resolve_checkpoint
from engine.config import Config
from engine.execution.device import choose_device, choose_dtype, free_bytes
from engine.formats.opening import open_reader
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Unconnected
from engine.layers.packing import RowKeeper
from engine.models.loader import loading_bytes
from engine.models.model import build_model
from engine.plugins.families import read_model
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.kinds import LINEAR, named
from engine.plugins.manager import Plugins
from engine.plugins.selection import expected_context
from engine.plugins.weight_type import with_weight_type
from engine.startup.linears import choose_linear, rank_context
from engine.startup.memory import check_weights
from engine.text.codec import Formats, load_codec
from engine.types.errors import PluginError, WeightsError


def preview_context(config: Config) -> AttentionContext:
    """Return the context that attention plugins would get.  A model that would have to be downloaded is left out.

    Raises ConfigError if the configured device is not here."""
    device = choose_device(config.device, 0)
    spec = _spec_at_hand(config)
    if spec is None:
        return expected_context(config, None, device=device.type)
    dtype = str(choose_dtype(config.model.dtype, device, spec.dtype)).removeprefix("torch.")
    return expected_context(config, spec.shape, device=device.type, dtype=dtype)


def preview_template(config: Config) -> str | None:
    """Return the model's chat template, '' if it has none; None if the model is not on this machine or unreadable."""
    found: list[str] = []

    def note(template: str) -> Formats:
        found.append(template)
        return Formats()

    if (directory := _directory_at_hand(config)) is None:
        return None
    try:
        load_codec(config.model, directory, note)
    except WeightsError:
        return None
    return found[0] if found else ""


def preview_weights(config: Config, spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes that a rank's weights take to load, and the bytes available if all ranks are on this machine.

    Raises ConfigError or PluginError, as a start would, if they do not fit, ranks cannot share them, the device is not
    here or no kernel multiplies by them."""
    config, spec = with_weight_type(config, spec)
    device = choose_device(config.device, 0)
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    ranks = config.device.tensor_parallel
    plan = build_model(spec.shape, Unconnected(0, ranks), torch.device("meta"), dtype)
    plugins = Plugins({LINEAR: named(config.plugins, LINEAR)}, options=config.plugins.options)
    kernel = choose_linear(plugins, rank_context(config, spec, device, dtype), lambda kernels: {})
    has_files = config.model.load_format == "safetensors"
    reader = open_reader(spec) if has_files and isinstance(kernel, RowKeeper) else None
    needed = loading_bytes(plan, device, config.model.load_format, kernel, reader)
    if reader is not None:
        reader.close()
    available = free_bytes(device)
    if device.type == "cpu":
        available //= ranks
    check_weights(spec, needed, dtype, available, ranks)
    return needed, available


def preview_attention(config: Config) -> tuple[AttentionSpec, torch.device, torch.dtype]:
    """Return the attention of this model's widest layers on one rank, its device and its type, without loading it.

    Raises ConfigError if the device is not here, WeightsError if the model is not."""
    device = choose_device(config.device, 0)
    spec = read_model(resolve_checkpoint(config.model.path, config.model.revision), config.plugins, config.model)
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    plan = build_model(spec.shape, Unconnected(0, config.device.tensor_parallel), torch.device("meta"), dtype)
    return plan.attention_spec.widest, device, dtype


def _spec_at_hand(config: Config) -> ModelSpec | None:
    directory = _directory_at_hand(config)
    try:
        return None if directory is None else read_model(directory, config.plugins)
    except (WeightsError, PluginError):
        return None


def _directory_at_hand(config: Config) -> Path | None:
    path = config.model.path
    try:
        return None if is_hub_id(path) else resolve_checkpoint(path, "")
    except WeightsError:
        return None
