"""Blocks are decoded to the bits of the gguf package, whatever is in them."""

import numpy as np
import pytest
import torch

from engine.formats.blocks import CHUNK, DECODERS, decode

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
from gguf.quants import dequantize  # noqa: E402


@pytest.mark.parametrize("kind", [*DECODERS, "F32", "F16", "BF16"])
def test_bits_are_those_of_the_reference(kind: str) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[stored]
    random = np.random.default_rng(7)
    data = random.integers(0, 256, (24, 16 * num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(data, stored).astype(np.float32)
    found = decode(torch.from_numpy(data), kind).numpy()
    assert found.shape == (24, 16 * size)
    assert np.array_equal(found, expected, equal_nan=True)


def test_a_large_matrix_is_decoded_in_chunks_as_in_one() -> None:
    rows = torch.randint(0, 256, (3, (CHUNK // 34 + 5) * 34), dtype=torch.uint8)
    rows[:, 1::34] &= 0x3F  # no infinite scale
    whole = decode(rows, "Q8_0")
    assert torch.equal(whole[2], decode(rows[2:], "Q8_0")[0])
