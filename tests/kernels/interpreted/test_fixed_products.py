"""Products with tiles of one size, through the kit for linear kernels, with fewer rows than a GPU is taken through."""

import pytest
import torch

from engine.kernels import fixed_products
from engine.kernels.fixed_products import fixed_product
from engine.plugins.declaration import read_declaration
from engine.plugins.linear import triton_int8
from engine.plugins.linear.triton import callboard_linear
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing import linear as kit


@pytest.fixture
def declares(monkeypatch):
    monkeypatch.setattr(kit, "SHAPES", ((64, 64), (37, 80)))
    monkeypatch.setattr(kit, "ROWS", (1, 2, 7, 16, 17, 40))
    monkeypatch.setattr(kit, "MOST_ROWS", 40)
    monkeypatch.setattr(kit, "INVARIANT_SHAPES", ((33, 300),))  # the last tile of inputs has a part of a tile
    monkeypatch.setattr(kit, "LARGE", (64, 64))
    found = read_declaration("engine.plugins.linear.triton")
    assert found is not None
    assert found.invariant
    return replace_dtypes(found, "float32", "bfloat16")


def replace_dtypes(declares, *dtypes):
    return type(declares)(
        api=1, packages=declares.packages, devices=declares.devices, dtypes=dtypes, invariant=declares.invariant
    )


def test_the_kit_finds_nothing(declares):
    kit.check_linear(callboard_linear, declares)


def test_the_kit_finds_tiles_that_are_chosen_by_the_number_of_rows(declares, monkeypatch):
    def by_rows(x_TI, weight_OI, bias_O):
        monkeypatch.setattr(fixed_products, "INPUT_BYTES", 256 if len(x_TI) < 17 else 64)
        return fixed_product(x_TI, weight_OI, bias_O)

    monkeypatch.setattr("engine.kernels.fixed_products.fixed_product", by_rows)
    with pytest.raises(ConformanceError, match="rows 0 to 1 alone differ from those of 40"):
        kit.check_linear(callboard_linear, replace_dtypes(declares, "float32"))


def test_rows_with_gaps_and_a_cut_weight():
    wide = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    found = fixed_product(wide[:, :64], weight[2:6], None)
    assert torch.equal(found, fixed_product(wide[:, :64].clone(), weight[2:6].clone(), None))
    assert (found - wide[:, :64] @ weight[2:6].T).abs().max() < 1e-5


@pytest.mark.parametrize("few", [16, 64])
def test_int8_weights_pass_the_kit_by_our_tiles_and_widened(declares, monkeypatch, few):
    monkeypatch.setattr(triton_int8, "FEW_ROWS", few)
    found = read_declaration("engine.plugins.linear.triton_int8")
    assert found is not None
    kit.check_linear(triton_int8.callboard_linear, found)


def test_int8_products_are_those_of_their_integers_and_scales():
    integers = torch.arange(-40, 40, dtype=torch.int8).reshape(8, 10)
    scales = torch.logspace(-3, 3, 8).bfloat16()
    found = fixed_product(torch.eye(10).bfloat16(), integers, None, scales)
    expected = (integers.float() * scales.float()[:, None]).T
    assert torch.allclose(found.float(), expected, rtol=2**-7, atol=0)  # one rounding, which the interpreter cuts off
