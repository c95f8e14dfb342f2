"""Products in float8 on a CPU, by a stand-in that asks of each call what torch asks of it on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import float8_ops
from engine.kernels.float8 import FLOAT8, rounded
from engine.kernels.float8_ops import round_rows
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear import torch_fp8
from engine.plugins.linear.torch_fp8 import Float8, callboard_linear
from engine.types.errors import PluginError

CONTEXT = LinearContext("cuda", "bfloat16", "fp8", checkpoint_dtype="bfloat16")


class ScaledProduct:
    """What ``ScaledBlas.cpp`` of torch 2.11 to 2.13 checks for scales of rows; cuBLASLt on Hopper."""

    def __init__(self) -> None:
        self.fast: list[bool] = []

    def __call__(
        self, left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: Any, use_fast_accum: bool
    ) -> Tensor:
        (rows, inner), outputs = left.shape, right.shape[1]
        assert left.dtype == right.dtype == FLOAT8
        assert left.stride() == (inner, 1), "row-major"
        assert right.stride() == (1, inner), "column-major"
        assert inner % 16 == outputs % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert (scale_a.shape, scale_b.shape) == ((rows, 1), (1, outputs))
        assert scale_a.is_contiguous()
        assert scale_b.stride(1) == 1
        assert out_dtype == torch.bfloat16
        self.fast.append(use_fast_accum)
        return (left.double() @ right.double() * scale_a * scale_b).to(out_dtype)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> ScaledProduct:
    made = ScaledProduct()
    monkeypatch.setattr(torch_fp8.torch.ops.aten, "_scaled_mm", made)
    return made


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_inputs_of_any_strides_reach_torch_as_it_wants_them(product: ScaledProduct, rows: int):
    weight, bias = numbers(48, 32), numbers(48, seed=1)
    packed = Float8().pack(weight)
    wide = numbers(rows, 64, seed=2)
    for x in (wide[:, :32], wide[:, 32:].t().contiguous().t(), wide[:, :32].contiguous()):
        found, expected = packed(x, bias), x.double() @ weight.double().t() + bias.double()
        assert found.shape == (rows, 48)
        assert (found.double() - expected).norm() <= 6e-2 * expected.norm()
    assert product.fast == [False] * (3 if rows else 0)


def test_sums_are_exact_unless_the_option_says_otherwise(product: ScaledProduct):
    for options, fast in (({}, False), ({"fast_accumulation": True}, True)):
        context = LinearContext("cuda", "bfloat16", "fp8", checkpoint_dtype="bfloat16", options=options)
        callboard_linear(context).pack(numbers(16, 16))(numbers(1, 16), None)
        assert product.fast.pop() is fast
    with pytest.raises(PluginError, match="fast_acumulation"):
        callboard_linear(LinearContext("cuda", "bfloat16", "fp8", options={"fast_acumulation": True}))


@pytest.mark.parametrize("group", [0, 128])
def test_rows_are_rounded_in_one_launch_where_kernels_run_and_fit(monkeypatch: pytest.MonkeyPatch, group: int):
    kernels = SimpleNamespace(round_rows=lambda *args: ("a launch", args[1]), widest_rounded=256)
    monkeypatch.setattr(float8_ops, "choose_kernels", lambda device: kernels)
    assert round_rows(numbers(3, 256), group) == ("a launch", group)
    assert round_rows(numbers(3, 384), group)[0].dtype == FLOAT8
    monkeypatch.setattr(float8_ops, "choose_kernels", lambda device: None)
    assert round_rows(numbers(3, 256), group)[0].dtype == FLOAT8


def test_a_checkpoint_that_was_rounded_with_a_scale_per_output_keeps_its_elements():
    """Through bfloat16: the largest of each row is float8's largest, so the scale is found again, and each element."""
    stored, scales = rounded(numbers(32, 64) * torch.logspace(-3, 2, 32)[:, None])
    as_read = (stored.float() * scales).bfloat16()
    again, _ = rounded(as_read)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))
