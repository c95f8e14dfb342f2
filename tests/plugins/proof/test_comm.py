"""The inputs of the checks of a communication library."""

import pytest
import torch

from engine.plugins.proof.comm import DTYPES, SHAPES, rank_input


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_is_strided_on_every_device_where_it_should_be(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for strided in (False, True):
        made = rank_input(1, shape, dtype, strided, device)
        assert (made.shape, made.dtype, made.device.type) == (shape, dtype, device)
        assert made.is_contiguous() != strided
