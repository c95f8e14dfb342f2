"""Checkpoints whose weights may take the place of others: the check of a directory, and directories of tensors.

Owns: what two checkpoints must have in common; the folder of received tensors.  Does not know: torch, ranks, requests.
"""

from engine.checkpoints.checkpoint import ModelSpec
from engine.types.errors import WeightsError


def check_same_model(old: ModelSpec, new: ModelSpec, load_format: str) -> None:
    """Raise WeightsError unless a checkpoint differs from the one that is served by its weights alone."""
    if load_format != "safetensors":
        raise WeightsError(f"model.load_format={load_format}: there are no weights that could change")
    if old.use.kind != "generate":
        raise WeightsError("a model that pools keeps the weights that it was started with; restart it")
    for what in ("architecture", "shape", "quantization", "eos_token_ids"):
        if (before := getattr(old, what)) != (after := getattr(new, what)):
            seen = f"{what} {after!r:.80} instead of {before!r:.80}" if what != "shape" else "another shape"
            raise WeightsError(f"{new.directory}: {seen}; weights may change, the model may not")
