"""Rows in float8 and their scales, against those that torch rounds one operation at a time: the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from engine.kernels.rounding import MAX_WIDTH, round_rows
from engine.plugins.linear.torch_fp8 import rounded


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
