"""Products with weights of 4 bits, through the kit for linear kernels and beside float64."""

import pytest
import torch

from engine.formats.integers import scaled, stored
from engine.kernels import int4
from engine.kernels.int4 import (
    BLOCK,
    FEW_ROWS,
    GROUP,
    SOME_ROWS,
    Nibbles,
    multiply_nibbles,
    pack_nibbles,
    widen_nibbles,
)
from engine.layers.packing import StoredRows
from engine.plugins.declaration import read_declaration
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear import triton_stored
from engine.plugins.linear.triton_int4 import Int4, callboard_linear
from engine.plugins.testing import linear as kit
from engine.types.errors import WeightsError


def weight_of(outputs, inputs):
    generator = torch.Generator().manual_seed(inputs)
    integers = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scales, zeros = torch.randn(2, outputs, inputs // GROUP, generator=generator)
    expected = (integers - 8).double().unflatten(1, (-1, GROUP)) * scales.double()[:, :, None] + zeros.double()[
        :, :, None
    ]
    return Nibbles(pack_nibbles(integers), scales, zeros), expected.flatten(1)


def test_the_kit_finds_nothing(monkeypatch):
    monkeypatch.setattr(kit, "SHAPES", ((64, 64), (37, 128), (9, 80)))  # the last is left to torch
    monkeypatch.setattr(kit, "ROWS", (1, 3, 4, 5, 17, 70))
    monkeypatch.setattr(kit, "MOST_ROWS", 70)
    monkeypatch.setattr(kit, "LARGE", (64, 64))
    found = read_declaration("engine.plugins.linear.triton_int4")
    assert found is not None
    kit.check_linear(callboard_linear, found)


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1, SOME_ROWS])
@pytest.mark.parametrize("inputs", [64, 192, 320])
def test_products_of_one_tile_and_of_several(monkeypatch, num_rows, inputs):
    monkeypatch.setattr(int4, "WIDEST_TILE", 2)
    monkeypatch.setattr(int4, "TILE_BYTES", 64)
    weight, expected = weight_of(11, inputs)
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(multiply_nibbles(x, weight).double(), x.double() @ expected.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("inputs", [64, 192, 2112])
def test_a_weight_is_widened_element_by_element(inputs):
    weight, expected = weight_of(5, inputs)
    assert torch.allclose(widen_nibbles(weight, torch.float32).double(), expected, rtol=1e-6, atol=1e-6)


def test_the_ends_of_each_group_are_kept_and_odd_sizes_are_left_to_torch():
    weight = torch.randn(16, 2 * BLOCK, generator=torch.Generator().manual_seed(4)).bfloat16()
    packed = Int4(int4).pack(weight)
    assert packed is not None
    kept = packed(torch.eye(2 * BLOCK).bfloat16(), None).t().float().unflatten(1, (-1, GROUP))
    groups = weight.float().unflatten(1, (-1, GROUP))
    steps = (groups.amax(2) - groups.amin(2)) / 15
    assert ((kept - groups).abs().amax(2) / steps).max() < 0.6
    assert packed.nbytes == 0.625 * weight.numel()
    assert Int4(int4).pack(torch.ones(16, 96).bfloat16()) is None


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_as_they_are_stored(width, dtype):
    generator = torch.Generator().manual_seed(width)
    integers = torch.randint(0, 16, (12, 256), generator=generator, dtype=torch.int32)
    scales = torch.randn(12, 256 // width, generator=generator).to(dtype)
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.int32)
    blocks = stored(integers, scales, zeros, (1, width), None)
    expected = scaled(integers, scales, zeros, (1, width))
    kernel = triton_stored.callboard_linear(LinearContext("cuda", str(dtype).removeprefix("torch.")))
    weight = torch.zeros(12, 256, dtype=dtype)
    name = f"{'UPPER' if dtype == torch.bfloat16 else 'HALF'}{width}"
    assert not kernel.keep(weight, StoredRows("w", "Q4_K", blocks, 256))
    for first in (0, 4):  # two matrices that are multiplied together
        part = slice(first, 4 if not first else 12)
        assert not kernel.keeps(weight)
        assert kernel.keep(weight[part], StoredRows("w", name, blocks[part], 256))
    assert kernel.keeps(weight)
    packed = kernel.pack(weight)
    assert packed.nbytes == 12 * 256 * kernel.element_bytes
    for rows in (1, 8, 70):
        x = torch.randn(rows, 256, generator=generator).to(dtype)
        found, wanted = packed(x, None).double(), x.double() @ expected.double().T
        assert (found - wanted).norm() < (3e-3 if dtype == torch.float16 else 1e-2) * wanted.norm()


def test_a_part_that_is_not_stored_so_leaves_floats():
    integers, scales = torch.randint(0, 16, (4, 64), dtype=torch.int32), torch.ones(4, 2).half()
    blocks = stored(integers, scales, 8 * torch.ones(4, 2, dtype=torch.int32), (1, 32), None)
    kernel = triton_stored.callboard_linear(LinearContext("cuda", "float16"))
    weight = torch.full((6, 64), 0.5).half()
    assert kernel.keep(weight[2:], StoredRows("w", "HALF32", blocks, 64))
    packed = kernel.pack(weight)
    expected = torch.cat((torch.full((2, 64), 0.5), integers.float() - 8))
    assert torch.equal(packed(torch.eye(64).half(), None).T.float(), expected)


def test_a_scale_that_is_no_number_is_named():
    scales = torch.full((4, 2), torch.nan).half()
    blocks = stored(torch.zeros(4, 64, dtype=torch.int32), scales, torch.zeros(4, 2, dtype=torch.int32), (1, 32), None)
    kernel = triton_stored.callboard_linear(LinearContext("cuda", "float16"))
    weight = torch.zeros(4, 64).half()
    assert kernel.keep(weight, StoredRows("model.w", "HALF32", blocks, 64))
    with pytest.raises(WeightsError, match=r"model\.w contains NaN"):
        kernel.pack(weight)
