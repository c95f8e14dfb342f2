"""What is guessed by a model that drafts."""

import numpy as np
import pytest

from engine.features.speculation.payoff import Payoff
from engine.features.speculation.planner import SpeculationPlanner, drafts_of
from engine.scheduling.completions import InFlight, Wave
from server.extensions.chaos.sim.liars import Everything

Guess = tuple[list[int], list[int]]


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    """Whatever it costs, everything that fits is drafted.  The known tokens of a row, and what was guessed behind."""
    seen: list[Guess] = []
    waves = SpeculationPlanner.waves

    def noting(self: SpeculationPlanner, record: InFlight, sampled: Wave) -> list[Wave]:
        for row in drafts_of(record):
            if drafted := self._drafted.get(row):
                known = self._table.tokens[row, : self._table.num_known[row]].tolist()
                seen.append((known, np.frombuffer(drafted, np.int32).tolist()))
        return waves(self, record, sampled)

    monkeypatch.setattr(SpeculationPlanner, "waves", noting)
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    return seen
