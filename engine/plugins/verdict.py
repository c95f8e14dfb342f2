"""The answer to how a checkpoint is served, from its description alone.

Owns: its words.  Does not know: weights, torch.
"""

from typing import Any

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.through_transformers import ThroughTransformers


def how_served(spec: ModelSpec) -> str:
    """Return a checkpoint's family or the lack of one, the part that is served, the form of its weights, and the length
    of sequences if it is less than the checkpoint states."""
    how = "through transformers" if isinstance(spec.shape, ThroughTransformers) else "natively"
    part = "" if spec.config["architectures"][0] == spec.architecture else ", its text part"
    stored = f", from {spec.quantization}" if spec.quantization else ""
    most = f", up to {spec.shape.max_len:,} tokens" if spec.shape.max_len < _stated_length(spec.config) else ""
    return f"{how}{part}{stored}{most}"


def _stated_length(config: dict[str, Any]) -> int:
    for name in ("thinker_config", "text_config"):
        config = config.get(name) or config
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) else 0
