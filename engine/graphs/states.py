"""The recurrences of a captured run with prompts: they break the capture, as attention does.

Legend: T tokens of the run, padding included (ragged, packed) · I, M numbers of a token before and after a recurrence
Owns: the one buffer that recurrences write to, the padding of their results.
Does not know: which recurrence a part computes, how captures are broken.

Which tokens belong to which row changes with each step, and only the host knows it.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.graphs.breakable import SegmentRecorder
from engine.graphs.device import GraphDevice
from engine.layers.states import Mix, RecurrentStates, StatesOfStep
from engine.types.errors import GraphError

RECURRENCE = "recurrence"  # the kind of break


class BreakingStates(StatesOfStep):
    """The states of the step that is run or replayed, for a model whose run may be captured.

    step: the states as that step's rows read and write them."""

    def __init__(self, states: RecurrentStates, recorder: SegmentRecorder, device: GraphDevice) -> None:
        self.layers = states.layers
        self._recorder = recorder
        self._graphs = device
        self._out = torch.empty(0)
        one = np.ones(1, dtype=np.int32)
        self._nothing = self.step = StatesOfStep(states, np.array([states.num_slots - 1]), one, one)

    def plan_nothing(self) -> None:
        """Let the next run be of one token, in the slot for padding."""
        self.step = self._nothing

    def mixed(self, mix: Mix, inner_TI: Tensor, states: tuple[Tensor, ...], width: int) -> Tensor:
        """Return the result of one layer, valid until the next layer's call."""
        if self._out.numel() < len(inner_TI) * width:
            # A warm-up is the first run, and the largest.
            self._out = self._graphs.buffer((len(inner_TI) * width,), inner_TI.dtype)
        out_TM = self._out[: len(inner_TI) * width].view(-1, width)
        weak = self._recorder.weak
        self._recorder.run(RECURRENCE, partial(self._mix_eagerly, mix, weak(inner_TI), states, weak(out_TM)))
        return out_TM

    def _mix_eagerly(self, mix: Mix, inner_TI: Tensor, states: tuple[Tensor, ...], out_TM: Tensor) -> None:
        if self._graphs.is_capturing():
            raise GraphError(
                "a recurrence was about to be captured instead of breaking the capture; replays would repeat the rows "
                "of the capture"
            )
        num_tokens = self._recorder.num_tokens
        out_TM[:num_tokens] = mix(inner_TI[:num_tokens], states, self.step)
        out_TM[num_tokens:] = 0.0
