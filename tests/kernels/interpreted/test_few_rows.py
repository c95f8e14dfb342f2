"""Products of a few rows, through the kit for linear kernels and beside float64."""

import pytest
import torch

from engine.kernels import few_rows
from engine.kernels.few_rows import MOST_ROWS, multiply_few, multiply_few_blocks
from engine.kernels.float8 import GROUP, rounded
from engine.plugins.declaration import read_declaration
from engine.plugins.linear import triton_rows
from engine.plugins.linear.torch_fp8_block import Fp8BlockWeight
from engine.plugins.linear.triton_rows import callboard_linear
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing import linear as kit


@pytest.fixture
def declares(monkeypatch):
    monkeypatch.setattr(kit, "SHAPES", ((64, 64), (37, 80)))
    monkeypatch.setattr(kit, "LARGE", (64, 64))
    found = read_declaration("engine.plugins.linear.triton_rows")
    assert found is not None
    return found


def test_the_kit_finds_nothing(declares):
    kit.check_linear(callboard_linear, declares)


def test_the_kit_finds_a_row_that_is_multiplied_by_another_one(declares, monkeypatch):
    def turned(x_TI, weight_OI, bias_O):
        return multiply_few(x_TI.flip(0), weight_OI, bias_O)

    monkeypatch.setattr("engine.kernels.few_rows.multiply_few", turned)
    with pytest.raises(ConformanceError, match="rows"):
        kit.check_linear(callboard_linear, declares)


@pytest.mark.parametrize("num_rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("inputs", [40, 64, 65, 200])
def test_inputs_of_one_tile_and_of_several(monkeypatch, num_rows, inputs):
    monkeypatch.setattr(few_rows, "WIDEST_TILE", 64)
    generator = torch.Generator().manual_seed(inputs)
    x, weight = torch.randn(num_rows, inputs, generator=generator), torch.randn(19, inputs, generator=generator)
    bias = torch.randn(19, generator=generator)
    expected = (x.double() @ weight.double().T + bias.double()).float()
    assert (multiply_few(x, weight, bias) - expected).abs().max() < 2e-5


def test_int8_weights_times_their_scales(monkeypatch):
    monkeypatch.setattr(few_rows, "WIDEST_TILE", 64)
    integers = torch.arange(-75, 75, dtype=torch.int8).repeat(6).reshape(9, 100)
    scales = torch.logspace(-3, 3, 9)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ (integers.double() * scales.double()[:, None]).T
    assert torch.allclose(multiply_few(x, integers, None, scales).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("widest", [256, 4096])
def test_float8_weights_with_a_scale_per_block(monkeypatch, num_rows, widest):
    """Blocks of outputs that programs do not end in, tiles with several groups, and scales that are padded."""
    monkeypatch.setattr(few_rows, "WIDEST_TILE", widest)
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(272, 640, generator=generator) * torch.logspace(-3, 1, 272)[:, None]
    x = torch.randn(num_rows, 640, generator=generator)
    x[:, 128:256] *= 1000
    packed = Fp8BlockWeight(weight.bfloat16())
    rows, scales = rounded(x, GROUP)
    found = multiply_few_blocks(rows, scales, packed._weight_OI, packed._scales_LB, num_rows, torch.float32)
    exact_x = rows.double() * scales.double().repeat_interleave(GROUP, 1)
    spread = packed._scales_LB.t()[:, : 640 // GROUP].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:272]
    expected = exact_x[:num_rows] @ (packed._weight_OI.double() * spread.double()).t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_large_head_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(triton_rows, "MOST_OUTPUTS", 8)
    kernel = triton_rows.FewRows(2, multiply_few)
    assert kernel.pack(torch.ones(9, 4)) is None
    assert kernel.pack(torch.ones(8, 4)) is not None
