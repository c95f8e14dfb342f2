"""The shape of a decoder that transformers computes, from facts about its class, as plain data.

Owns: the facts, and the shape that follows from them.  Does not know: torch, transformers.
"""

from typing import Any, ClassVar

import msgspec

from engine.checkpoints.shape import AttentionShape, DecoderShape, LayerShape, Names, PartShape, Unchanged


class AttentionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the attention function, over all ranks.  The fields are those of ``AttentionShape``."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties and calls of a model class of transformers for one config.json.

    width: numbers of a token between the products of its widest layer.  layers: the calls of attention in order.
    embedding, head: their names in a checkpoint, without ``.weight``.  unread: as in ``DecoderShape``.
    """

    vocab_size: int
    hidden_size: int
    max_len: int
    width: int
    layers: tuple[AttentionFacts, ...]
    tied: bool
    embedding: str
    head: str
    unread: tuple[str, ...] = ()


class WholeLayer(PartShape, frozen=True, kw_only=True):
    """The part of a layer besides attention, which transformers computes."""

    size: int

    @property
    def width(self) -> int:
        return self.size


class ThroughTransformers(DecoderShape, frozen=True, kw_only=True):
    """A decoder that a class of transformers computes, except for attention and linear layers.

    architecture: the class.  config: config.json, from which it is made."""

    built_by: ClassVar[str] = "engine.models.through_transformers.decoder:TransformersDecoder"
    architecture: str
    config: dict[str, Any]


def shape_of(facts: Facts, architecture: str, config: dict[str, Any]) -> ThroughTransformers:
    """Return the shape of a checkpoint with that config.json.

    Layers share pages, so those with smaller or fewer key/value heads get heads of the widest."""
    head_size = max(one.head_size for one in facts.layers)
    num_kv_heads = max(one.num_kv_heads for one in facts.layers)
    layers = [
        LayerShape(
            attention=AttentionShape(
                num_heads=one.num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                rotary=None,
                scale=one.scale,
                window=one.window,
                soft_cap=one.soft_cap,
                sinks=one.sinks,
            ),
            mlp=WholeLayer(size=facts.width),
        )
        for one in facts.layers
    ]
    return ThroughTransformers(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_len=facts.max_len,
        layers=tuple(layers),
        norm=Unchanged(),
        tied=facts.tied,
        unread=facts.unread,
        names=Names(embedding=facts.embedding, head=facts.head),
        architecture=architecture,
        config=config,
    )
