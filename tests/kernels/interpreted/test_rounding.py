"""Rows in float8 and their scales, against those that torch rounds one operation at a time: the same bits."""

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.kernels import rounding
from engine.kernels.activation import KINDS, gated
from engine.kernels.float8 import GROUP, rounded
from engine.kernels.fused import FusedKernels
from engine.kernels.norm import add_norm
from engine.kernels.rounding import MAX_WIDTH, round_rows
from engine.layers.packing import Linears
from engine.layers.rounded import RoundedRows, RoundingMLP, RoundingNorm
from engine.models import decoder_weights
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear import torch_fp8
from engine.plugins.linear.torch import Plain
from engine.plugins.linear.torch_fp8 import Float8
from engine.plugins.linear.torch_fp8_block import Fp8BlockWeight
from engine.plugins.testing.steps import Driver
from engine.settings import own_kernels
from tests.kernels.interpreted.planting import with_mistake
from tests.models.checkpoints import build, random_tokens, save
from tests.plugins import test_torch_fp8, test_torch_fp8_block

pytestmark = pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 100, 1024])
def test_rows_of_every_size(dtype: torch.dtype, width: int):
    check_rows(rounding, dtype, width)


def check_rows(module: ModuleType, dtype: torch.dtype, width: int):
    x_TI = torch.randn(6, width, generator=torch.Generator().manual_seed(1))
    x_TI *= torch.tensor([1e-20, 1e-3, 1.0, 1e4, 1e20, 0.0])[:, None]
    x_TI[2, 3:] = 0.0
    found, expected = module.round_rows(x_TI.to(dtype)), rounded(x_TI.to(dtype))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])
    assert found[1].shape == (6, 1)


def test_rows_of_a_wider_tensor_and_of_one_that_lies_the_other_way():
    check_wider(rounding)


def check_wider(module: ModuleType):
    x_TI = torch.randn(4, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    for view_TI in (x_TI[:, :48], x_TI[::2], x_TI.t()):
        found, expected = module.round_rows(view_TI), rounded(view_TI.contiguous())
        assert found[0].is_contiguous()
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])


def test_what_is_not_a_number_stays_none_and_other_rows_are_as_ever():
    x_TI = torch.ones(3, 16)
    x_TI[1, 5] = torch.nan
    rounded_TI, scales_T1 = round_rows(x_TI)
    product_T = (rounded_TI.float() * scales_T1).sum(1)
    assert product_T.isnan().tolist() == [False, True, False]
    assert product_T[0] == 16.0


def test_no_rows_and_rows_that_are_too_wide():
    assert round_rows(torch.ones(0, 16))[1].shape == (0, 1)
    with pytest.raises(AssertionError, match="a row of 32769 numbers"):
        round_rows(torch.ones(1, MAX_WIDTH + 1))


def test_a_scale_for_each_group_in_columns_of_whole_fours():
    x_TI = torch.randn(5, 384, generator=torch.Generator().manual_seed(3))
    x_TI[:, 128:256] *= 1e6
    x_TI[2, 256:] = 0.0
    for view_TI in (x_TI.bfloat16(), x_TI.bfloat16().repeat(1, 2)[:, 384:]):
        found, expected = round_rows(view_TI, 128), rounded(view_TI, 128)
        assert found[0].shape == (8, 384)
        assert (found[1].shape, found[1].stride()) == ((8, 3), (1, 8))
        assert torch.equal(found[0][:5].view(torch.uint8), expected[0][:5].view(torch.uint8))
        assert torch.equal(found[1][:5], expected[1][:5])
    with pytest.raises(AssertionError, match="not made of groups of 128"):
        round_rows(x_TI[:, :200], 128)


@pytest.mark.parametrize(("width", "group"), [(384, 0), (384, 128), (100, 0)])
def test_behind_a_norm_rows_are_rounded_as_by_themselves(width: int, group: int):
    check_norm(rounding, width, group)


def check_norm(module: ModuleType, width: int, group: int):
    generator = torch.Generator().manual_seed(4)
    x_TD, update_TD = (torch.randn(3, width, generator=generator).bfloat16() for _ in range(2))
    weight_D, alone_TD = torch.randn(width, generator=generator).bfloat16(), x_TD.clone()
    found = module.add_norm_round(x_TD, update_TD, weight_D, 1e-6, group)
    expected = round_rows(add_norm(alone_TD, update_TD, weight_D, 1e-6), group)
    assert torch.equal(x_TD, alone_TD)
    assert torch.equal(found[0][:3].view(torch.uint8), expected[0][:3].view(torch.uint8))
    assert torch.equal(found[1][:3], expected[1][:3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "group"), [(384, 0), (384, 128), (100, 0), (1536, 128)])
def test_behind_a_gate_rows_are_rounded_as_by_themselves(width: int, group: int, kind: str):
    check_gate(rounding, width, group, kind)


def check_gate(module: ModuleType, width: int, group: int, kind: str):
    gate_up_T2I = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(5)).bfloat16()
    gate_up_T2I[1, :width] = 0.0
    found, expected = module.gated_round(gate_up_T2I, kind, group), round_rows(gated(gate_up_T2I, kind), group)
    assert found[0].shape == expected[0].shape
    assert found[1].stride() == expected[1].stride()
    assert torch.equal(found[0][:3].view(torch.uint8), expected[0][:3].view(torch.uint8))
    assert torch.equal(found[1][:3], expected[1][:3])


ROUNDING_MISTAKES = {
    "scale of another group": (
        check_norm, "scales + g_G * group_stride", "scales + (g_G + 1) % tl.cdiv(WIDTH, GROUP) * group_stride"
    ),
    "a scale for all groups": (
        check_norm, "tl.max(tl.abs(x_GI), 1), SMALLEST)", "tl.max(tl.abs(x_GI)) + 0 * tl.max(x_GI, 1), SMALLEST)"
    ),
    "nothing is scaled": (
        check_rows, "x_GI, tl.zeros_like(x_GI) + scale_G[:, None])", "x_GI, tl.zeros_like(x_GI) + 1)"
    ),
    "no smallest scale": (check_rows, "tl.max(tl.abs(x_GI), 1), SMALLEST)", "tl.max(tl.abs(x_GI), 1), 0.0)"),
    "padding counts": (
        check_rows,
        "tl.load(x + row * stride + place_GI, mask=live_GI, other=0.0)",
        "tl.load(x + row * stride + place_GI, mask=live_GI, other=1e6)",
    ),
    "rows of whole width": (check_wider, "tl.load(x + row * stride", "tl.load(x + row * WIDTH"),
    "a norm is not rounded": (check_norm, "norm_GD.to(x.dtype.element_ty)", "norm_GD"),
    "a gate is not rounded": (check_gate, "up_GI).to(gate_up.dtype.element_ty)", "up_GI)"),
    "gates' scale of another row": (check_gate, "PROGRAMS).to(tl.int64)", "PROGRAMS).to(tl.int64) * 0"),
    "gates' scales of the first groups": (
        check_gate, "row_stride, group_stride, first, GROUP", "row_stride, group_stride, 0, GROUP"
    ),
}  # fmt: skip
SIZES: dict[Any, tuple[Any, ...]] = {
    check_rows: (torch.bfloat16, 100),
    check_norm: (384, 128),
    check_gate: (1536, 128, "silu"),
}


@pytest.mark.parametrize("mistake", ROUNDING_MISTAKES)
def test_a_mistake_in_rounding_is_found(mistake: str, tmp_path: Path):
    check, right, wrong = ROUNDING_MISTAKES[mistake]
    planted = with_mistake(rounding, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check(planted, *SIZES.get(check, ()))


def test_a_product_reads_rounded_rows_and_rows_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", test_torch_fp8_block.scaled_product)
    x_TI = torch.randn(5, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    weight = Fp8BlockWeight(torch.randn(32, 256, generator=torch.Generator().manual_seed(7)).bfloat16())
    found = weight(RoundedRows.of(round_rows(x_TI, GROUP), 5), None)
    assert type(found) is torch.Tensor
    assert torch.equal(found, weight(x_TI, None))


class CountedKernels(FusedKernels):
    """Kernels that count their launches by name."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.launches: list[str] = []
        for name in ("add_norm", "add_norm_round", "gated", "gated_round"):
            setattr(self, name, self._counting(name, getattr(self, name)))

    def _counting(self, name: str, launch: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self.launches.append(name)
            return launch(*given, **named)

        return counted


def decode(spec: Any, kernels: CountedKernels) -> tuple[torch.Tensor, list[str]]:
    """Logits of a prompt and a decode step, and what the latter launches."""
    linears = Linears(Float8(), Plain(2))
    model = load_model(
        spec, LocalComm(), torch.device("cpu"), torch.bfloat16, "safetensors", 0,
        linears=linears, progress=False, kernels=kernels,
    )  # fmt: skip
    driver = Driver(model, page_size=4)
    found = [driver.step({"a": random_tokens(5, 1)})["a"]]
    kernels.launches.clear()
    found.append(driver.step({"a": random_tokens(1, 2)})["a"])
    return torch.cat(found), kernels.launches


def test_a_layer_has_three_launches_less_and_the_same_bits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """The bits are those of the same products, of the same shapes, called twice, of float64."""
    monkeypatch.setenv(own_kernels.VARIABLE, "triton")
    monkeypatch.setattr(torch_fp8.torch.ops.aten, "_scaled_mm", test_torch_fp8.ScaledProduct())
    kernels = CountedKernels()
    monkeypatch.setattr(torch_fp8, "round_rows", lambda x: kernels.launches.append("round_rows") or round_rows(x))
    spec = read_model(save(build("qwen3-tied"), tmp_path))
    layers = len(spec.shape.layers)
    found, launches = decode(spec, kernels)
    joined = Counter(launches)
    monkeypatch.setattr(decoder_weights, "join_roundings", lambda *_: None)
    expected, launches = decode(spec, kernels)
    assert Counter(launches) == {"add_norm": 2 * layers - 1, "round_rows": 4 * layers, "gated": layers}
    assert joined == {"add_norm_round": 2 * layers - 1, "gated_round": layers, "round_rows": layers + 1}
    assert torch.equal(found, expected)


def test_a_product_that_adapters_change_gets_rows_as_they_are(tmp_path: Any):
    spec = read_model(save(build("qwen3-tied"), tmp_path))
    model = load_model(
        spec, LocalComm(), torch.device("cpu"), torch.bfloat16, "safetensors", 0,
        linears=Linears(Float8(), Plain(2)), progress=False, kernels=FusedKernels("cpu"),
    )  # fmt: skip
    layer = model.layers[1]
    assert isinstance(layer.before_attention, RoundingNorm)
    assert isinstance(layer.mlp, RoundingMLP)
    x_TD = torch.ones(2, spec.shape.hidden_size).bfloat16()
    kernels = FusedKernels("cpu")
    assert isinstance(layer.before_attention.added(x_TD.clone(), x_TD, kernels), RoundedRows)
    layer.attention.qkv.adapt(lambda packed: lambda x, bias: x)
    found = layer.before_attention.added(x_TD.clone(), x_TD, kernels)
    assert not isinstance(found, RoundedRows)
    assert found.dtype == torch.bfloat16
