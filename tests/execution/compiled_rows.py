"""A driver's sequences as an engine keeps them, each in a row of its own, and steps of them in one call of C.

Owns: which rows sequences have.  Does not know: the model, what a step must give.
"""

import numpy as np
import torch

from engine.execution.batch import Int32, Int64
from engine.execution.compiled_decodes import CompiledDecodes, compiled_decodes
from engine.execution.host_rows import HostRows
from engine.kernels.cpu import cpu_kernels
from engine.layers.states import RecurrentStates
from engine.plugins.comm.local import LocalComm
from engine.plugins.testing.steps import MAX_SEQUENCES, Driver
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.params import SamplingParams

MAX_ROWS, MAX_LEN = 6, 80


class Rows:
    """Rows in another order than that of the sequences, of which there are as many as ``order`` names."""

    def __init__(self, driver: Driver, order: tuple[int, ...] = (4, 0, 3)) -> None:
        self.driver = driver
        self.order = order
        vocab_size = driver.model.shape.vocab_size
        self.rows = HostRows(MAX_ROWS, MAX_LEN, driver.pool.page_size, torch.device("cpu"), driver.pool.page_stride)
        self.sampler = Sampler(MAX_ROWS, vocab_size, MAX_LEN, torch.device("cpu"), cpu_kernels())
        self.states: RecurrentStates | None = None
        self._before_SX: torch.Tensor | None = None
        if driver.states is not None:
            self.states = RecurrentStates(driver.model.shape.states_of_rank(1), MAX_ROWS, torch.device("cpu"))
        given = (driver.model, driver.pool, driver.attention, self.rows, self.sampler, LocalComm(), self.states)
        self.decodes = compiled_decodes(*given)
        for row in range(MAX_ROWS):
            self.sampler.admit((Newcomer(row, SamplingParams(temperature=0.0), np.arange(3, dtype=np.int32), 3),), ())

    def step(self, new_tokens: dict[str, list[int]]) -> torch.Tensor:
        """A step of the driver, layer by layer, whose states ``told`` puts back; all logits."""
        if (states := self.driver.states) is not None:
            self._before_SX = states.data.clone()
        return torch.cat([*self.driver.step(new_tokens).values()])

    @property
    def whole(self) -> CompiledDecodes:
        assert self.decodes is not None
        return self.decodes

    def told(self) -> tuple[Int64, Int32]:
        """Copy the sequences' tokens, pages and states before the step into their rows; the rows, and their lengths."""
        rows_N = np.array(self.order)
        if self.states is not None and self._before_SX is not None:
            self.states.data.fill_(torch.nan)
            self.states.data[rows_N] = self._before_SX[self._slots()]
        for row, one in zip(rows_N, self.driver.sequences.values(), strict=True):
            self.rows.tokens_RM[row, : len(one.tokens)] = torch.tensor(one.tokens)
            self.rows.pages_RP[row, : len(one.pages)] = torch.tensor(one.pages)
        return rows_N, np.array([len(one.tokens) for one in self.driver.sequences.values()], dtype=np.int32)

    def have_states_of_driver(self) -> bool:
        """Whether the rows' states are those behind the driver's step, and no other row has one."""
        if self.states is None or self.driver.states is None:
            return True
        others = [row for row in range(MAX_ROWS) if row not in self.order]
        expected_NX, found_NX = self.driver.states.data[self._slots()], self.states.data[list(self.order)]
        is_same = torch.equal(expected_NX.nan_to_num(3e38), found_NX.nan_to_num(3e38))  # between states are gaps
        return is_same and bool(self.states.data[others].isnan().all())

    def _slots(self) -> list[int]:
        """Return the slots of the driver's sequences."""
        return [MAX_SEQUENCES - 1 - number for number in range(len(self.order))]
