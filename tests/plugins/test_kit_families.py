"""The kit for model families: each mutant of Qwen3's is wrong in one way, and must be named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from engine.checkpoints.shape import AttentionShape, DecoderShape
from engine.layers.self_attention import SelfAttention
from engine.plugins.hookspecs import ModelContext
from engine.plugins.model.qwen3 import callboard_model
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.model import check_model
from tests.models.checkpoints import build


class KeepsNothing(SelfAttention):
    """Does not store keys and values, so that the backend reads what was in the pool."""

    def project(self, index: int, normed_TD: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.qkv(normed_TD).view(-1, *self.head_shape)[:, : self.num_queries]


class LeavesOut(SelfAttention):
    """Has a result without what attention gave."""

    def output(self, attended_TQH: torch.Tensor) -> torch.Tensor:
        return super().output(torch.zeros_like(attended_TQH))


class KeepingNothing(AttentionShape, frozen=True, kw_only=True):
    built_by: ClassVar[str] = f"{__name__}:{KeepsNothing.__name__}"


class LeavingOut(AttentionShape, frozen=True, kw_only=True):
    built_by: ClassVar[str] = f"{__name__}:{LeavesOut.__name__}"


def with_attention(shape: DecoderShape, kind: type[AttentionShape] = AttentionShape, **changes: Any) -> DecoderShape:
    layers = []
    for layer in shape.layers:
        fields = msgspec.structs.asdict(layer.attention) | changes
        layers.append(msgspec.structs.replace(layer, attention=kind(**fields)))
    return msgspec.structs.replace(shape, layers=tuple(layers))


def with_another_base(context: ModelContext) -> DecoderShape:
    context.fields.table["rope_parameters"]["rope_theta"] = 500.0
    return callboard_model(context)


FIRST = "logits of a prompt, in one step and by pages of 1"
Hook = Callable[[ModelContext], DecoderShape]
# What is wrong -> the family, and what the first case says of it.
MUTANTS: dict[str, tuple[Hook, str]] = {
    "another base of the rotary frequencies": (with_another_base, "logits are off by"),
    "a tensor that is not there": (
        lambda context: with_attention(callboard_model(context), output_bias=True),
        "o_proj.bias",
    ),
    "a tensor that it leaves unread": (
        lambda context: with_attention(callboard_model(context), head_norm=None),
        "k_norm.weight' has no place in Qwen3ForCausalLM",
    ),
    "keys and values that are not kept": (
        lambda context: with_attention(callboard_model(context), KeepingNothing),
        "logits are off by nan",
    ),
    "attention's result left out": (
        lambda context: with_attention(callboard_model(context), LeavingOut),
        "logits are off by",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_family_is_named(what: str, tmp_path: Path) -> None:
    hook, said = MUTANTS[what]
    with pytest.raises(ConformanceError) as found:
        check_model(lambda context: hook(context), build("qwen3"), tmp_path, ranks=1, captured=False)
    assert said in found.value.failures[FIRST]
