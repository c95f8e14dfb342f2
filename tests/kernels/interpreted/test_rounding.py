"""Rows in float8 and their scales, against those that torch rounds one operation at a time: the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from engine.kernels.float8 import rounded
from engine.kernels.norm import add_norm
from engine.kernels.rounding import MAX_WIDTH, add_norm_round, round_rows


@pytest.fixture(autouse=True)
def float8_as_a_gpu_rounds_it(monkeypatch: pytest.MonkeyPatch):
    """The interpreter rounds 31.6 to 16: it drops what carries over from the mantissa to the exponent."""
    convert = interpreter._convert_float

    def converted(numbers: np.ndarray, of: Any, to: Any, rounding: Any) -> np.ndarray:
        if to != tl.float8e4nv:
            return convert(numbers, of, to, rounding)
        return torch.from_numpy(numbers.view(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 100, 1024])
def test_rows_of_every_size(dtype: torch.dtype, width: int):
    x_TI = torch.randn(6, width, generator=torch.Generator().manual_seed(1))
    x_TI *= torch.tensor([1e-20, 1e-3, 1.0, 1e4, 1e20, 0.0])[:, None]
    x_TI[2, 3:] = 0.0
    found, expected = round_rows(x_TI.to(dtype)), rounded(x_TI.to(dtype))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])
    assert found[1].shape == (6, 1)


def test_rows_of_a_wider_tensor_and_of_one_that_lies_the_other_way():
    x_TI = torch.randn(4, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    for view_TI in (x_TI[:, :48], x_TI[::2], x_TI.t()):
        found, expected = round_rows(view_TI), rounded(view_TI.contiguous())
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
    generator = torch.Generator().manual_seed(4)
    x_TD, update_TD = (torch.randn(3, width, generator=generator).bfloat16() for _ in range(2))
    weight_D, alone_TD = torch.randn(width, generator=generator).bfloat16(), x_TD.clone()
    found = add_norm_round(x_TD, update_TD, weight_D, 1e-6, group)
    expected = round_rows(add_norm(alone_TD, update_TD, weight_D, 1e-6), group)
    assert torch.equal(x_TD, alone_TD)
    assert torch.equal(found[0][:3].view(torch.uint8), expected[0][:3].view(torch.uint8))
    assert torch.equal(found[1][:3], expected[1][:3])
