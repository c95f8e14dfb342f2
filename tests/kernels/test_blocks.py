"""Products with weights in blocks of a GGUF file, next to float64 of the floats that the gguf package reads."""

from random import Random

import numpy as np
import pytest
import torch

from engine.kernels.blocks import BlockProducts, Format, Parts, StoredWeight, block_products
from engine.layers.packing import StoredRows
from tests.kernels.stored_blocks import BITS, INT4, int4_floats, random_rows

pytestmark = pytest.mark.skipif(block_products() is None, reason="there is no C compiler, or no AVX2")
# Of the sum of the products' magnitudes.
ERRORS = {Parts.ROUNDED: 1.0 / 126, Parts.FINE: 1.0 / (126 << 7), Parts.EXACT: 1e-6}


@pytest.fixture
def functions() -> BlockProducts:
    found = block_products()
    assert found is not None
    return found


def floats_of(rows: StoredRows) -> torch.Tensor:
    if Format[rows.format] in INT4:
        return int4_floats(rows)
    gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
    read = gguf.quants.dequantize(rows.blocks.numpy(), gguf.GGMLQuantizationType[rows.format])
    return torch.from_numpy(np.array(read, dtype=np.float32))


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("outputs", [1, 37, 200])
def test_rows_are_those_that_the_file_means_to_the_bit(functions: BlockProducts, kind: Format, outputs: int) -> None:
    stored = random_rows(Random(outputs), kind, outputs, 768)
    weight = StoredWeight(functions, [stored], Parts.EXACT)
    assert torch.equal(weight.rows(torch.arange(outputs)), floats_of(stored))
    twice_T = torch.tensor([outputs - 1, 0, outputs - 1])
    assert torch.equal(weight.rows(twice_T), floats_of(stored)[twice_T])
    assert weight.rows(twice_T[:0]).shape == (0, 768)
    for beyond in (-1, outputs):
        with pytest.raises(IndexError, match=f"is not among the weight's {outputs}"):
            weight.rows(torch.tensor([0, beyond]))


@pytest.mark.parametrize("parts", Parts)
@pytest.mark.parametrize("kind", Format)
def test_a_product_is_as_close_to_float64_as_its_input_is_kept(
    functions: BlockProducts, kind: Format, parts: Parts
) -> None:
    dice = Random(kind * 3 + parts)
    for _ in range(12):
        outputs, inputs = dice.choice((1, 8, 31, 64, 65, 200)), dice.choice((256, 512, 1280))
        stored = random_rows(dice, kind, outputs, inputs)
        weight = StoredWeight(functions, [stored], parts)
        rows, threads = dice.choice((0, 1, 2, 3, 5, 7, 8, 9, 13, 17, 33)), dice.choice((1, 2))
        x_TI = torch.randn(rows, inputs + 5)[:, :inputs] * 10.0 ** dice.randint(-3, 3)
        bias_O = torch.randn(outputs) if dice.random() < 0.5 else None
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found_TO = weight(x_TI, bias_O)
        finally:
            torch.set_num_threads(before)
        weight_OI = floats_of(stored).double()
        expected_TO = x_TI.double() @ weight_OI.T + (0 if bias_O is None else bias_O.double())
        largest_T1 = x_TI.double().abs().amax(1, keepdim=True)
        bound_TO = largest_T1 * weight_OI.abs().sum(1) * ERRORS[parts] + expected_TO.abs() * 1e-6 + 1e-6
        assert found_TO.shape == expected_TO.shape
        assert ((found_TO - expected_TO).abs() <= bound_TO).all()


@pytest.mark.parametrize("parts", Parts)
@pytest.mark.parametrize("kind", Format)
def test_a_row_has_the_same_bits_in_every_batch(functions: BlockProducts, kind: Format, parts: Parts) -> None:
    weight = StoredWeight(functions, [random_rows(Random(1), kind, 300, 1024)], parts)
    x_TI = torch.randn(60, 1024)
    x_TI[3] *= 1000
    x_TI[4, 5] = torch.nan
    alone = torch.cat([weight(x_TI[t : t + 1], None) for t in range(60)])
    assert alone[4].isnan().all()
    others = [t for t in range(60) if t != 4]
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 17, 60):
        assert torch.equal(weight(x_TI[:count], None)[others[: count - 1]], alone[others[: count - 1]])
    permuted = torch.randperm(60)
    keep = permuted != 4
    assert torch.equal(weight(x_TI[permuted], None)[keep], alone[permuted][keep])


def test_parts_of_a_weight_may_be_in_several_formats(functions: BlockProducts) -> None:
    dice = Random(4)
    sizes = dict(zip(Format, (3, 64, 17, 8, 1, 40, 64, 5, 19, 2, 9, 33, 64, 1, 7), strict=True))
    stored = [random_rows(dice, kind, outputs, 512) for kind, outputs in sizes.items()]
    weight = StoredWeight(functions, stored, Parts.EXACT)
    weight_OI = torch.cat([floats_of(one) for one in stored])
    assert torch.equal(weight.rows(torch.arange(weight.outputs)), weight_OI)
    x_TI, bias_O = torch.randn(9, 512), torch.randn(weight.outputs)
    # Sums of float32: an error of some units of the sum of the factors' sizes.
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().T
    expected_TO = x_TI.double() @ weight_OI.double().T + bias_O
    assert ((weight(x_TI, bias_O).double() - expected_TO).abs() <= 1e-5 * (size_TO + 1)).all()


@pytest.mark.parametrize("kind", Format)
def test_a_weight_takes_the_bytes_of_the_file(functions: BlockProducts, kind: Format) -> None:
    stored = random_rows(Random(2), kind, 128, 512)
    # Scales of 6 bits are kept in 8.
    most = 1.03 if kind in (Format.Q4_K, Format.Q5_K) else 1
    assert BITS[kind] / 8 * 128 * 512 <= StoredWeight(functions, [stored], Parts.EXACT).nbytes
    assert StoredWeight(functions, [stored], Parts.EXACT).nbytes <= most * stored.blocks.nbytes


def test_a_scale_that_is_no_number_is_found(functions: BlockProducts) -> None:
    whole, damaged = (random_rows(Random(seed), Format.Q4_1, 40, 64) for seed in (1, 2))
    damaged.blocks[39, 20:22] = torch.tensor([0, 0x7C])  # an infinite scale in its last row's second block
    assert StoredWeight(functions, [whole], Parts.EXACT).damaged is None
    assert StoredWeight(functions, [whole, damaged], Parts.EXACT).damaged is damaged
