"""The answer to how a checkpoint is served, from its description alone.

Owns: its words.  Does not know: weights, torch.
"""

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import DecoderShape


def how_served(spec: ModelSpec) -> str:
    """Return a checkpoint's family or the lack of one, the part that is served, and the form of its weights."""
    how = "natively" if spec.shape.built_by == DecoderShape.built_by else "through transformers"
    part = "" if spec.config["architectures"][0] == spec.architecture else ", its text part"
    stored = f", from {spec.quantization}" if spec.quantization else ""
    return f"{how}{part}{stored}"
