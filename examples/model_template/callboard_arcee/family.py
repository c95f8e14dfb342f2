"""Arcee (AFM-4.5B): Llama whose MLP has no gate, and a squared ReLU."""

from typing import ClassVar

from callboard.plugins import (
    AttentionShape,
    DecoderShape,
    ModelContext,
    PartShape,
    alike,
    decoder,
    hookimpl,
    pre_norm,
    read_rotary,
    read_sizes,
)

CALLBOARD_PLUGIN = {"api": 1, "architectures": {"ArceeForCausalLM": "arcee"}}


class SquaredShape(PartShape, frozen=True, kw_only=True):
    """down(relu(up(x))^2)."""

    built_by: ClassVar[str] = "callboard_arcee.squared:SquaredMLP"
    intermediate_size: int
    bias: bool

    @property
    def width(self) -> int:
        """See ``PartShape``."""
        return self.intermediate_size


@hookimpl
def callboard_model(context: ModelContext) -> DecoderShape:
    """attention_bias covers q, k, v and the output projection alike."""
    fields = context.fields
    if (activation := fields.text("hidden_act", "relu2")) != "relu2":
        raise fields.error("hidden_act", activation, '"relu2"')
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias", False)
    attention = AttentionShape(**sizes.heads, rotary=read_rotary(fields, sizes), qkv_bias=bias, output_bias=bias)
    mlp = SquaredShape(intermediate_size=sizes.intermediate_size, bias=fields.flag("mlp_bias", False))
    return decoder(fields, sizes, alike(fields, sizes, pre_norm(fields, attention, mlp)))
