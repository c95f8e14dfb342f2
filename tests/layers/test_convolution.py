"""A causal convolution over rows of any lengths gives the bits of one pass over each row, wherever it is cut."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.checkpoints.shape import Rows
from engine.layers.comm import Unconnected
from engine.layers.convolution import CausalConvolution
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.torch_recurrences import TorchRecurrences

CPU, CHANNELS, LENGTH = torch.device("cpu"), 5, 41


def new_convolution(taps: int, bias: bool) -> CausalConvolution:
    torch.manual_seed(taps)
    convolution = CausalConvolution([Rows("", CHANNELS)], taps, bias, Unconnected(0, 1), CPU, torch.float32)
    for one in convolution.slices(""):
        one.target.normal_()
    convolution.pack()
    return convolution


def in_steps(convolution: CausalConvolution, taps: int, inputs: list[Tensor], cuts: list[list[int]]) -> list[Tensor]:
    """Each row's results; cuts: for each step the new tokens of each row, 0 for none."""
    states = RecurrentStates([[(taps - 1, CHANNELS)]], 2 * len(inputs), CPU)
    states.data.fill_(torch.nan)
    done = [0] * len(inputs)
    outputs: list[list[Tensor]] = [[] for _ in inputs]
    for cut in cuts:
        rows = [row for row, count in enumerate(cut) if count]
        counts = np.array([cut[row] for row in rows], dtype=np.int32)
        x_TC = torch.cat([inputs[row][done[row] : done[row] + cut[row]] for row in rows])
        for row in rows:
            done[row] += cut[row]
        slots = np.array([2 * row + 1 for row in rows])
        step = StatesOfStep(states, slots, np.array([done[row] for row in rows], dtype=np.int32), counts)
        found_TC = convolution(x_TC, states.layers[0][0], step, TorchRecurrences())
        for row, y_TC in zip(rows, found_TC.split(counts.tolist()), strict=True):
            outputs[row].append(y_TC)
    assert done == [len(one) for one in inputs]
    return [torch.cat(one) for one in outputs]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("taps", [2, 3, 4])
@torch.inference_mode()
def test_rows_in_steps_have_the_bits_of_one_pass_and_the_values_of_torch(taps: int, bias: bool) -> None:
    convolution = new_convolution(taps, bias)
    inputs = [torch.randn(LENGTH, CHANNELS) for _ in range(3)]
    alone = [in_steps(convolution, taps, [one], [[LENGTH]])[0] for one in inputs]
    cuts = [[7, 1, 0], [1, 1, 20], [1, 1, 1], [30, 2, 1], [1, 36, 1], [1, 0, 18]]
    for y_TC, expected_TC in zip(in_steps(convolution, taps, inputs, cuts), alone, strict=True):
        assert torch.equal(y_TC, expected_TC)
    by_torch = torch.nn.functional.conv1d(
        inputs[0].t()[None], convolution.weight_CK[:, None], convolution.bias_C, padding=taps - 1, groups=CHANNELS
    )
    assert torch.allclose(alone[0], by_torch[0, :, :LENGTH].t(), atol=1e-6)
