"""Attention whose queries are scaled after their rotation: by their position, or by learned weights.

Owns: these shapes.  Does not know: torch, families.
"""

from typing import ClassVar

import msgspec

from engine.checkpoints.shape import AttentionShape, LatentAttentionShape


class TemperatureShape(msgspec.Struct, frozen=True, kw_only=True):
    """The factor of a query at a position, 1 + strength * log(1 + (position + offset) // period), which sharpens scores
    in long contexts (Nakanishi 2025).

    max_len: positions that there can be."""

    strength: float
    period: int
    max_len: int
    offset: int = 0


class TemperedAttentionShape(AttentionShape, frozen=True, kw_only=True):
    """Attention whose queries have a temperature."""

    built_by: ClassVar[str] = "engine.layers.scaled_queries:TemperedAttention"
    temperature: TemperatureShape


class TemperedLatentShape(LatentAttentionShape, frozen=True, kw_only=True):
    """Latent attention whose queries have a temperature."""

    built_by: ClassVar[str] = "engine.layers.scaled_queries:TemperedLatentAttention"
    temperature: TemperatureShape


class LateNormAttentionShape(AttentionShape, frozen=True, kw_only=True):
    """Attention whose head norm, a ``HeadLengthShape``, has weights that apply after rotation.

    query_norm, key_norm: names of the weights."""

    built_by: ClassVar[str] = "engine.layers.scaled_queries:LateNormAttention"
    query_norm: str
    key_norm: str
