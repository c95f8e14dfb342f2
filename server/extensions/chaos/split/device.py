"""The device of a split engine: pages come from other engines and go to them.

Owns: what lands in which page.  Does not know: the protocol by which it comes.
"""

from collections.abc import Callable

import numpy as np

from engine.features.handover.desk import WantedBytes
from engine.features.handover.messages import landings_of, state_number
from engine.messages import Step, StepDone
from server.extensions.chaos.sim.device import SimDevice, ints
from server.extensions.chaos.sim.failures import SimIncorrect


class HashedDevice(SimDevice):
    """The device, with pages that land from other engines.  land: gives these, for each rank."""

    land: Callable[[int, int, int], list[list[memoryview]]]
    landed_state = b""

    def run(self, step: Step) -> StepDone:
        """Run a step."""
        for one in landings_of(step):
            pages = ints(one.pages).tolist()
            by_rank = self.land(one.number, one.first, len(pages))
            for page, *contents in zip(pages, *by_rank, strict=True):
                if any(bytes(content) != bytes(contents[0]) for content in contents):
                    raise SimIncorrect(f"step {step.step_id}: ranks have different pages of transfer {one.number}")
                self._kv[page] = np.frombuffer(contents[0], dtype=np.uint64)
                self._mark("pages landed")
            if one.with_state:
                self.states.arrived[state_number(one.number)] = np.frombuffer(self.landed_state, dtype=np.uint64)
                self._mark("state landed")
        return super().run(step)

    def content(self, wanted: WantedBytes) -> bytes:
        """Return the bytes of pages and of a state, as they are now."""
        state = self.states.saved(-1, wanted.slot)[wanted.first : wanted.end] if wanted.slot >= 0 else b""
        pages: bytes = self._kv[ints(wanted.pages)].tobytes()
        return pages + state
