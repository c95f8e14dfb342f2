"""An EAGLE-3 head's checkpoint (Li et al. 2025): one layer that drafts tokens from hidden states of a target model.

Owns: its config.json, and its shape.  Does not know: torch, the target model.
"""

from pathlib import Path
from typing import ClassVar

from engine.checkpoints.checkpoint import ModelSpec, read_spec
from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import MAX_VOCAB, MAX_WIDTH, pre_norm, read_gated, read_norm, read_rotary, read_sizes
from engine.checkpoints.shape import AttentionShape, DecoderShape, Names, PartShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Tables from the head's tokens, which are fewer, to the target model's, and back.
TO_MODEL, FROM_MODEL = "d2t", "t2d"


class HeadShape(DecoderShape, frozen=True, kw_only=True):
    """The shape of a head, which reads hidden states of a model.  vocab_size, hidden_size: also the model's."""

    def state_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose inputs it reads in a model of so many; that number for the last one's result."""
        return (num_layers,)


class EagleHeadShape(HeadShape, frozen=True, kw_only=True):
    """The shape of an EAGLE-3 head.  vocab_size, hidden_size: also the target model's, whose embedding it reads.

    draft_vocab_size: tokens that the head can propose.  state_norm: norm of the hidden state before the layer.
    state_layers: the head reads the inputs of these layers of the model, each with ``state_size`` numbers; empty for
    the usual ones (``state_layers_of``).
    norm_before_residual: the layer's result is added to the normed hidden state."""

    built_by: ClassVar[str] = "engine.features.speculation.head_model:EagleHead"
    draft_vocab_size: int
    state_norm: PartShape
    state_size: int
    state_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    @property
    def num_states(self) -> int:
        """Number of hidden states that it reads of a token."""
        return len(self.state_layers) or 3

    def state_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return ``state_layers`` for a model of so many layers; by default an early, the middle and a late one."""
        return self.state_layers or (2, num_layers // 2, num_layers - 3)


def read_eagle_head(directory: Path) -> ModelSpec:
    """Read a head's checkpoint.  Raises WeightsError naming the file, field and expectation."""
    return read_spec(directory, _read_shape)


def _read_shape(architecture: str, fields: Fields) -> EagleHeadShape:
    if architecture != ARCHITECTURE:
        raise fields.error("architectures", architecture, f"{ARCHITECTURE}, an EAGLE-3 head")
    sizes = read_sizes(fields)
    if sizes.num_layers != 1:
        raise fields.error("num_hidden_layers", sizes.num_layers, "1")
    state_size = fields.integer("target_hidden_size", sizes.hidden_size, maximum=MAX_WIDTH)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(
        **sizes.heads,
        rotary=read_rotary(fields, sizes),
        qkv_bias=bias,
        output_bias=bias,
        input_size=2 * sizes.hidden_size,
    )
    layer = pre_norm(fields, attention, read_gated(fields, sizes, bias=fields.flag("mlp_bias", False)))
    return EagleHeadShape(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_len=sizes.max_len,
        layers=(layer,),
        norm=read_norm(fields, "norm"),
        unread=(rf"^({TO_MODEL}|{FROM_MODEL})$", r"^embed_tokens\.weight$"),
        names=Names(embedding="embed_tokens", layers="midlayer"),
        draft_vocab_size=fields.integer("draft_vocab_size", sizes.vocab_size, maximum=MAX_VOCAB),
        state_norm=read_norm(fields, "hidden_norm"),
        state_size=state_size,
        state_layers=_state_layers(fields),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


def _state_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers: SGLang's ``eagle_config`` numbers them by output, vLLM's top-level field by input."""
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = fields.section("eagle_config").integers(name)
    layers = tuple(one + 1 for one in outputs) or fields.integers(name)
    if list(layers) != sorted(set(layers)):
        raise fields.error(name, list(layers), "layers in ascending order, each once")
    return layers
