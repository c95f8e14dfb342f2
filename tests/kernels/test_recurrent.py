"""The kernels of recurrent layers in C, next to their definitions in float64 and the same in torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.cpu import cpu_kernels
from engine.layers.recurrences import Recurrences
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.torch_recurrences import TorchRecurrences
from engine.settings.own_kernels import c_compiler
from tests.kernels.recurrences import convolution, gated_delta, mamba_2

pytestmark = pytest.mark.skipif(not c_compiler(), reason="there is no C compiler")
CPU, EPS = torch.device("cpu"), 1e-6
LENGTHS = (1, 5, 66)
# G, H, K, V: heads that share keys, sizes that fill vectors and sizes that do not, more than one block of columns.
SHAPES = [(2, 4, 16, 64), (1, 3, 9, 5), (1, 2, 32, 128), (2, 2, 8, 90)]
Run = Callable[[Recurrences, Tensor, Tensor, StatesOfStep], Tensor]


@pytest.fixture
def compiled() -> Recurrences:
    found = cpu_kernels()
    assert found is not None
    assert found.recurrences is not None
    return found.recurrences


def in_cuts(run: Run, recurrences: Recurrences, sizes: tuple[int, ...], inputs: list[Tensor], cut: int) -> list[Tensor]:
    """Results of all rows side by side, ``cut`` new tokens each in a step, or what is left; and their last states."""
    states = RecurrentStates([[sizes]], len(inputs) + 1, CPU)
    states.data.fill_(torch.nan)
    outs: list[list[Tensor]] = [[] for _ in inputs]
    for start in range(0, max(map(len, inputs)), cut):
        rows = [row for row, one in enumerate(inputs) if len(one) > start]
        parts = [inputs[row][start : start + cut] for row in rows]
        counts = np.array([len(one) for one in parts], dtype=np.int32)
        step = StatesOfStep(states, np.array(rows) + 1, counts + np.int32(start), counts)
        found = run(recurrences, torch.cat(parts), states.layers[0][0], step)
        for row, part in zip(rows, found.split(counts.tolist()), strict=True):
            outs[row].append(part)
    assert states.data[0].isnan().all(), "a slot that no row has was written"
    return [*(torch.cat(one) for one in outs), states.layers[0][0][1:].clone()]


def equal_in_any_cut(run: Run, compiled: Recurrences, sizes: tuple[int, ...], inputs: list[Tensor]) -> list[Tensor]:
    """The results of C, which have the same bits in steps of any size, and alone; they are those of torch about."""
    found = in_cuts(run, compiled, sizes, inputs, max(LENGTHS))
    for cut in (1, 7, 64):
        assert all(map(torch.equal, in_cuts(run, compiled, sizes, inputs, cut), found)), f"in steps of {cut}"
    assert torch.equal(in_cuts(run, compiled, sizes, inputs[1:2], 3)[0], found[1])
    for one, expected in zip(found, in_cuts(run, TorchRecurrences(), sizes, inputs, 64), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gated_delta_rule(compiled: Recurrences, shape: tuple[int, int, int, int]) -> None:
    groups, heads, key, value = shape
    inputs = [torch.randn(n, 2 * groups * key + heads * (value + 2)) for n in LENGTHS]
    decay_H, bias_H = -torch.rand(heads) * 4, torch.randn(heads)

    def run(recurrences: Recurrences, x_TI: Tensor, matrices: Tensor, step: StatesOfStep) -> Tensor:
        qkv_TC, b_TH, a_TH = x_TI.split((x_TI.shape[1] - 2 * heads, heads, heads), -1)
        return recurrences.delta(qkv_TC.contiguous(), a_TH, b_TH, decay_H, bias_H, 2.0, matrices, step)

    for o_THV, x_TI in zip(equal_in_any_cut(run, compiled, (heads, key, value), inputs), inputs, strict=False):
        qkv_TC, b_TH, a_TH = x_TI.split((x_TI.shape[1] - 2 * heads, heads, heads), -1)
        expected_THV = gated_delta(qkv_TC, a_TH, b_TH, decay_H, bias_H, 2.0, groups, key)
        torch.testing.assert_close(o_THV.double(), expected_THV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mamba_2(compiled: Recurrences, shape: tuple[int, int, int, int]) -> None:
    groups, heads, key, value = shape
    inputs = [torch.randn(n, 2 * groups * key + heads * (value + 1)) for n in LENGTHS]
    decay_H, bias_H, skip_H = -torch.rand(heads) * 4, torch.randn(heads), torch.randn(heads)

    def run(recurrences: Recurrences, x_TI: Tensor, matrices: Tensor, step: StatesOfStep) -> Tensor:
        xkq_TC, sizes_TH = x_TI.split((x_TI.shape[1] - heads, heads), -1)
        return recurrences.ssd(xkq_TC.contiguous(), sizes_TH, decay_H, bias_H, skip_H, 0.1, matrices, step)

    for o_THV, x_TI in zip(equal_in_any_cut(run, compiled, (heads, key, value), inputs), inputs, strict=False):
        xkq_TC, sizes_TH = x_TI.split((x_TI.shape[1] - heads, heads), -1)
        expected_THV = mamba_2(xkq_TC, sizes_TH, decay_H, bias_H, skip_H, 0.1, groups, key)
        torch.testing.assert_close(o_THV.double(), expected_THV, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("channels", [3, 64, 1030])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution(compiled: Recurrences, channels: int, taps: int, silu: bool) -> None:
    inputs, weight_KC = [torch.randn(length, channels + 2) for length in LENGTHS], torch.randn(taps, channels)
    bias_C = torch.randn(channels) if silu else None

    def run(recurrences: Recurrences, x_TI: Tensor, windows: Tensor, step: StatesOfStep) -> Tensor:
        return recurrences.convolve(x_TI[:, 1:-1], weight_KC, bias_C, windows, step, silu)

    for y_TC, x_TI in zip(equal_in_any_cut(run, compiled, (taps - 1, channels), inputs), inputs, strict=False):
        expected_TC = convolution(x_TI[:, 1:-1], weight_KC, bias_C)
        torch.testing.assert_close(y_TC.double(), F.silu(expected_TC) if silu else expected_TC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm", ["none", "first", "last", "of each group"])
def test_gate_and_norm(compiled: Recurrences, groups: int, norm: str) -> None:
    width = groups * 37
    o_TI, z_TI = torch.randn(5, width), torch.randn(5, width + 1)[:, :-1] * 30
    weight = {"none": None, "of each group": torch.randn(37)}.get(norm, torch.randn(width))
    kind = "sigmoid" if norm == "of each group" else "silu"
    arguments = (z_TI, weight, groups, EPS, norm == "first", kind)
    expected = TorchRecurrences().gate(o_TI, *arguments)
    torch.testing.assert_close(compiled.gate(o_TI.clone(), *arguments), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        compiled.gate(o_TI[2:3].clone(), z_TI[2:3], *arguments[1:]),
        compiled.gate(o_TI, *arguments)[2:3],
        atol=0,
        rtol=0,
    )


def test_a_row_that_is_not_finite_reaches_no_other(compiled: Recurrences) -> None:
    inputs = [torch.randn(4, 2 * 8 + 8 + 2) for _ in range(3)]
    inputs[1][2, 5] = torch.nan

    def run(recurrences: Recurrences, x_TI: Tensor, matrices: Tensor, step: StatesOfStep) -> Tensor:
        qkv_TC, a_TH, b_TH = x_TI.split((24, 1, 1), 1)
        return recurrences.delta(qkv_TC.contiguous(), a_TH, b_TH, -torch.ones(1), torch.ones(1), 1.0, matrices, step)

    found = in_cuts(run, compiled, (1, 8, 8), inputs, 2)
    assert [bool(one.isfinite().all()) for one in found[:3]] == [True, False, True]


def test_threads_change_no_bits(compiled: Recurrences, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, key, value, width = 4, 32, 64, 2 * 2 * 32 + 4 * 64
    x_TI, decay_H, weight_KC = torch.randn(130, width + 2 * heads), -torch.rand(heads), torch.randn(4, width)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        states = RecurrentStates([[(3, width), (heads, key, value)]], 2, CPU)
        counts = np.array([100, 30], dtype=np.int32)
        step, (windows, matrices) = StatesOfStep(states, np.array([1, 0]), counts, counts), states.layers[0]
        x_TC, a_TH, b_TH = x_TI.split((width, heads, heads), 1)
        qkv_TC = compiled.convolve(x_TC, weight_KC, None, windows, step, True)
        o_THV = compiled.delta(qkv_TC, a_TH, b_TH, decay_H, decay_H, 1.0, matrices, step)
        o_THV = o_THV + compiled.ssd(qkv_TC, a_TH, decay_H, decay_H, decay_H, 0.0, matrices, step)
        gated_TI = compiled.gate(o_THV.flatten(1), qkv_TC[:, : heads * value], None, heads, EPS, False)
        found.append((gated_TI, states.data.clone()))
    assert all(map(torch.equal, *found))
