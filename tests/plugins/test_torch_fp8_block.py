"""Products in float8 with scales of blocks, on a CPU, by a stand-in that asks of a call what torch asks on Hopper."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.quantization import Quantization
from engine.config import Config
from engine.graphs.splitting import operation_name
from engine.kernels.float8 import FLOAT8
from engine.plugins.declaration import Declaration
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear.torch_fp8_block import (
    CALLBOARD_PLUGIN,
    Float8Blocks,
    Fp8BlockWeight,
    callboard_linear,
    in_blocks,
)
from engine.plugins.manager import Plugins
from engine.plugins.testing.linear import check_linear
from engine.startup.linears import choose_linear, rank_context
from engine.types.errors import PluginError

GPU = LinearContext("cuda", "bfloat16", "fp8", scale_block=(128, 128))


def scaled_product(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    recipe_a: F.ScalingType,
    scale_b: Tensor,
    recipe_b: F.ScalingType,
    *,
    output_dtype: Any,
) -> Tensor:
    """What ``ScaledBlas.cpp`` of torch 2.11 to 2.13 checks for these recipes, and the product in float64."""
    (rows, inner), outputs = left.shape, right.shape[1]
    groups, blocks = inner // 128, -(-outputs // 128)
    room = -(-groups // 4) * 4
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert left.dtype == right.dtype == FLOAT8
    assert left.stride() == (inner, 1), "row-major"
    assert right.stride() == (1, inner), "column-major"
    assert inner % 128 == outputs % 16 == rows % 4 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert (scale_a.shape, scale_b.shape) == ((rows, groups), (room, blocks))
    assert scale_a.stride(0) == scale_b.stride(0) == 1
    assert scale_a.stride(1) == rows or groups == 1
    assert scale_b.stride(1) == room or blocks == 1
    scaled_left = left.double() * scale_a.double().repeat_interleave(128, 1)
    scales_right = scale_b[:groups].double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :outputs]
    return (scaled_left @ (right.double() * scales_right)).to(output_dtype)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_product)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def as_deepseek(weight_OI: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """Elements, and ``weight_scale_inv``, as a checkpoint stores them."""
    blocks = weight_OI.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    if powers_of_two:
        scales = scales.log2().ceil().exp2()
    return (blocks / scales).to(FLOAT8).flatten(2, 3).flatten(0, 1), scales[:, 0, :, 0]


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def test_the_kit_finds_it_right(product: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugins.testing.linear.NUM_LARGE", 2)
    declares = Declaration(**{**CALLBOARD_PLUGIN, "dtypes": ("bfloat16",), "quantizations": ("fp8",)})
    check_linear(callboard_linear, declares)


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_a_checkpoint_keeps_its_elements_and_its_scales(powers_of_two: bool) -> None:
    """Through bfloat16, to which a weight is read; scales of powers of two leave the top of float8 unused."""
    weight = numbers(256, 384) * torch.logspace(-4, 2, 256)[:, None]
    stored, scales = as_deepseek(weight, powers_of_two)
    found, found_scales = in_blocks((stored.float() * spread(scales)).bfloat16())
    # Elements that leave the top unused come back larger by a power of two, and scales smaller.
    shift = (found_scales / scales).log2().round().exp2()
    assert torch.equal(found.float() * spread(shift), stored.float())
    assert (found_scales / shift / scales - 1).abs().max() < 2**-9  # bfloat16's rounding; other scales are off by 2^-4


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("outputs", [128, 272])
def test_inputs_reach_torch_as_it_wants_them(product: None, rows: int, outputs: int) -> None:
    weight, bias = numbers(outputs, 640), numbers(outputs, seed=1)
    wide = numbers(rows, 1280, seed=2)
    wide[:, 128:256] *= 1000  # one group, whose scale is nobody else's
    for x in (wide[:, :640], wide[:, 640:].t().contiguous().t()):
        found, expected = Fp8BlockWeight(weight)(x, bias), x.double() @ weight.double().t() + bias.double()
        assert found.shape == (rows, outputs)
        assert (found.double() - expected).norm() <= 6e-2 * expected.norm()


def test_a_compiler_traces_it_once_for_any_number_of_rows(product: None) -> None:
    packed, traces = Fp8BlockWeight(numbers(128, 256)), []

    def look(trace: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        traces.append([name for node in trace.graph.nodes if (name := operation_name(node))])
        return trace.forward

    with torch.inference_mode():
        traced = torch.compile(lambda x: packed(x, None), backend=look, fullgraph=True, dynamic=True)
        for rows in (5, 8):
            x = numbers(rows, 256, seed=rows)
            assert torch.equal(traced(x), packed(x, None))  # bits of one call of torch, made twice
    assert traces == [["callboard::round_rows", "callboard::multiply_blocks"]]


def test_odd_sizes_are_left_to_torch() -> None:
    assert Float8Blocks().pack(numbers(128, 64)) is None
    assert Float8Blocks().pack(numbers(120, 128)) is None


def chosen(context: LinearContext, seconds: dict[str, float]) -> str:
    kernel = choose_linear(Plugins({"linear": "auto"}), context, lambda kernels: {one: seconds[one] for one in kernels})
    return type(kernel).__module__.rpartition(".")[2]


def test_it_is_chosen_for_what_it_keeps_and_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("engine.plugins.linear.torch_fp8_block.try_out", lambda device: None)
    rows_faster = {"torch_fp8": 1.0, "torch_fp8_block": 2.0}
    assert chosen(GPU, rows_faster) == "torch_fp8_block"
    assert "for weights in fp8 (it keeps the elements that the checkpoint stores)" in caplog.text
    for block in ((1, 0), (0, 0), None):
        context = LinearContext("cuda", "bfloat16", "fp8", scale_block=block)
        assert chosen(context, rows_faster) == "torch_fp8"
    assert chosen(context, {"torch_fp8": 2.0, "torch_fp8_block": 1.0}) == "torch_fp8_block"


@pytest.mark.parametrize(("kind", "told"), [("float", (128, 128)), ("int", None)])
def test_a_kernel_is_told_what_shares_a_scale_in_the_checkpoint(kind: str, told: tuple[int, int] | None) -> None:
    stored = Quantization(method="compressed-tensors", kind=kind, bits=8, block=(128, 128))
    spec = read_model(resolve_checkpoint("demo", ""))
    spec = msgspec.structs.replace(spec, quantization=stored)
    assert rank_context(Config(), spec, torch.device("cpu"), torch.bfloat16).scale_block == told


def test_where_it_cannot_run_another_serves_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("it runs here")
    caplog.set_level("INFO")
    assert chosen(GPU, {}) == "torch_fp8"
    assert "linear.torch_fp8_block is out: linear.torch_fp8_block needs a Hopper GPU" in caplog.text
    with pytest.raises(PluginError, match=r"set plugins\.linear=torch_fp8"):
        choose_linear(Plugins({"linear": "torch_fp8_block"}), GPU, lambda kernels: {})
    plugins = Plugins({"linear": "auto"}, options={"linear.torch_fp8_block": {"fast": True}})
    with pytest.raises(PluginError, match="unknown field `fast`"):
        choose_linear(plugins, GPU, lambda kernels: {})
