"""Checks that a token of a recurrent part has the same bits however its sequence is cut into steps, and in any batch.

Legend: T new tokens of the step · L positions of a sequence · D model dim
Owns: sequences of random numbers, cut in two ways.  Does not know: what a part computes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints.shape import RecurrentShape
from engine.layers.part import Recurrent
from engine.layers.states import RecurrentStates, StatesOfStep

# For each sequence, its tokens in each step.
CUTS = ((37, 70, 1, 1, 1, 3, 29), (1, 1, 1, 1, 1), (66, *[1] * 6), (1, 1, 64, 2, 1), (4, 8, 1, 16, 11))


@torch.inference_mode()
def require_same_states(
    part: Recurrent, shape: RecurrentShape, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare sequences computed alone and at once with the same ones cut into shared steps.

    Raises AssertionError with the first difference."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randn((sum(cut), hidden_size), generator=generator).to(device, dtype) for cut in CUTS]
    alone = [_results(part, shape, [one], [(len(one),)])[0] for one in sequences]
    shared = _results(part, shape, sequences, CUTS)
    for number, (expected_LD, found_LD) in enumerate(zip(alone, shared, strict=True)):
        differing = (expected_LD != found_LD).any(1).nonzero().flatten().tolist()
        assert not differing, (
            f"sequence {number} of {len(expected_LD)} tokens: {len(differing)} of them, position {differing[0]} first, "
            f"have other bits in steps of {CUTS[number]} tokens than alone and at once"
        )


def _results(
    part: Recurrent, shape: RecurrentShape, sequences: Sequence[Tensor], cuts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the part's output for each position of each sequence.  The states hold NaN at first."""
    states = RecurrentStates([shape.states], len(sequences), sequences[0].device)
    states.data.fill_(torch.nan)
    done = np.zeros(len(sequences), dtype=np.int32)
    outs: list[list[Tensor]] = [[] for _ in sequences]
    for number in range(max(map(len, cuts))):
        rows = np.array([row for row, cut in enumerate(cuts) if number < len(cut)])
        counts = np.array([cuts[row][number] for row in rows], dtype=np.int32)
        new = [sequences[row][done[row] : done[row] + count] for row, count in zip(rows, counts, strict=True)]
        done[rows] += counts
        step = StatesOfStep(states, rows, done[rows], counts)
        out_TD = part.output(part.advance(torch.cat(new), states.layers[0], step, None))
        for row, out in zip(rows, torch.split(out_TD, counts.tolist()), strict=True):
            outs[row].append(out)
    return [torch.cat(one) for one in outs]
