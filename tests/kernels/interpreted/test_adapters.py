"""The products of adapters: each row with its own, in batches of any mix, and rows without one as they were."""

import numpy as np
import pytest
import torch

from engine.kernels.adapters import OUTPUTS_AT_ONCE, add_adapters, output_tiles

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "outputs", "rank"),
    [(1, 3, [40, OUTPUTS_AT_ONCE + 9, 40], 5), (40, 3, [70], 16), (17, 20, [30, 30], 70), (300, 2, [16], 3)],
)
def test_each_row_gets_the_update_of_its_slot_alone(num_rows, num_slots, outputs, rank, dtype):
    generator = torch.Generator().manual_seed(num_rows)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = 150
    a_SPRI, b_SRO = random(num_slots, len(outputs), rank, inputs), random(num_slots, rank, sum(outputs))
    slots_T = torch.from_numpy(np.random.default_rng(num_rows).integers(-1, num_slots, num_rows))
    a_SPRI[slots_T.max().item() :] = torch.nan if num_rows == 1 else a_SPRI[slots_T.max().item() :]
    x_TI, y_TO = random(num_rows, 2 * inputs)[:, :inputs], random(num_rows, sum(outputs))
    if num_rows == 1:
        slots_T[0] = 1
        a_SPRI[2:] = torch.nan  # another slot's numbers are read nowhere
        a_SPRI[:2] = random(2, *a_SPRI.shape[1:])
    expected = y_TO.double()
    matrix_O = torch.repeat_interleave(torch.arange(len(outputs)), torch.tensor(outputs))
    for row, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            h_PR = (a_SPRI[slot].double() @ x_TI[row].double()).to(dtype).double()
            expected[row] += (h_PR[matrix_O] * b_SRO[slot].double().t()).sum(1)
    before = y_TO.clone()
    given = y_TO.data_ptr()
    found = add_adapters(y_TO, x_TI, slots_T, a_SPRI, b_SRO, output_tiles(outputs, CPU))
    assert found.data_ptr() == given
    tolerance = 1e-3 if dtype == torch.float32 else 4.0
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.02)
    assert torch.equal(found[slots_T < 0], before[slots_T < 0])


def test_a_row_has_the_same_bits_in_any_batch():
    x_TI, y_TO = torch.randn(40, 64), torch.randn(40, 48)
    a_SPRI, b_SRO = torch.randn(4, 1, 8, 64), torch.randn(4, 8, 48)
    slots_T = torch.arange(40) % 5 - 1
    tiles = output_tiles([48], CPU)
    together = add_adapters(y_TO.clone(), x_TI, slots_T, a_SPRI, b_SRO, tiles)
    for row in (0, 1, 17, 39):
        one = slice(row, row + 1)
        assert torch.equal(
            add_adapters(y_TO[one].clone(), x_TI[one], slots_T[one], a_SPRI, b_SRO, tiles), together[one]
        )
