"""A decoder whose layers differ in their heads, read keys and values of other layers, and have inputs of their own.

Owns: these shapes, which Gemma 4 has.  Does not know: torch, families.
"""

from typing import ClassVar

from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    ExpertsShape,
    GatedShape,
    LatentAttentionShape,
    LayerShape,
    MatrixRows,
    PartShape,
    RMSNormShape,
)


class NormedValuesShape(AttentionShape, frozen=True, kw_only=True):
    """Attention with an RMS norm without weights over each value.

    eps: of that norm.  shared: whether values are the keys before these are normed and rotated."""

    built_by: ClassVar[str] = "engine.layers.layered_attention:NormedValuesAttention"
    eps: float
    shared: bool = False

    @property
    def inner(self) -> tuple[MatrixRows, MatrixRows, MatrixRows]:
        query, key, value = super().inner
        return query, key, key if self.shared else value


class BorrowingShape(AttentionShape, frozen=True, kw_only=True):
    """Attention over the keys and values of an earlier layer.  lender: index of that layer."""

    built_by: ClassVar[str] = "engine.layers.layered_attention:BorrowingAttention"
    lender: int


class BesideExpertsShape(ExpertsShape, frozen=True, kw_only=True):
    """A mixture of experts and an MLP for all tokens, each between norms of its own; all read the layer's sum itself.

    dense: the MLP.  eps: of the router's norm, whose weight is ``router.scale``.
    before_dense, behind_dense, before_experts, behind_experts: the norms."""

    built_by: ClassVar[str] = "engine.layers.beside_experts:BesideExperts"
    dense: GatedShape
    eps: float
    before_dense: RMSNormShape
    behind_dense: RMSNormShape
    before_experts: RMSNormShape
    behind_experts: RMSNormShape

    @property
    def width(self) -> int:
        return super().width + self.dense.width


class InputGateShape(PartShape, frozen=True, kw_only=True):
    """A layer's own input of each token, multiplied by a gate of the layer's sum: out(activation(gate(x)) * input).

    size: of the input."""

    built_by: ClassVar[str] = "engine.layers.layer_inputs:InputGate"
    size: int
    activation: str
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"


class LayeredLayerShape(LayerShape, frozen=True, kw_only=True):
    """A layer whose sum at the end gets the norm ``behind_input`` of ``input``, and is multiplied by a stored number.

    input: None for a layer without an input of its own.  scalar: name of the number."""

    behind_input: PartShape
    input: InputGateShape | None = None
    scalar: str = "layer_scalar"


class LayerInputsShape(PartShape, frozen=True, kw_only=True):
    """The inputs of all layers: (norm(project(x) / sqrt(D)) + table[token] sqrt(size)) / sqrt(2), for embeddings x.

    size: of one layer's input.  vocab_size: rows of the table.  eps: of the norm."""

    built_by: ClassVar[str] = "engine.layers.layer_inputs:LayerInputs"
    size: int
    num_layers: int
    vocab_size: int
    eps: float
    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"


class LayeredShape(DecoderShape, frozen=True, kw_only=True):
    """A decoder with such layers.  inputs: None for layers without inputs of their own."""

    built_by: ClassVar[str] = "engine.models.layered_decoder:LayeredDecoder"
    inputs: LayerInputsShape | None = None

    @property
    def input_width(self) -> int:
        """Numbers of a token's inputs of all layers."""
        return self.inputs.num_layers * self.inputs.size if self.inputs else 0

    @property
    def _widest(self) -> AttentionShape | LatentAttentionShape:
        return max(self.attentions, key=lambda one: one.head_size)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of the layers with the widest heads."""
        return self._widest.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of the widest heads."""
        return self._widest.head_size
