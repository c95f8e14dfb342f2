"""Pages that are on their way back from host memory while the model already runs: a layer waits for its own.

Legend: T new tokens in the step (ragged, packed) · N query heads · H head size
Owns: which layers have something to wait for, and the waiting.  Does not know: pages, how they are copied.
"""

from typing import Any

from torch import Tensor

from engine.execution.captured_steps import CapturedDecodes
from engine.features.host_tier.copy_stream import CopyStream, Mark
from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    GraphAttentionBuilder,
    is_capturable,
    writer_of,
)
from engine.messages import Step


class Landings:
    """The copies that were queued and that no layer has waited for, by the first layer that needs each."""

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self._marks: dict[int, Mark] = {}

    def expect(self, layer: int, mark: Mark) -> None:
        """Expect the pages of ``layer`` and those after it at ``mark``.  Called in the order of layers."""
        self._marks.pop(layer, None)
        self._marks[layer] = mark

    def wait_for(self, layer: int) -> None:
        """Let the model's stream wait for the pages of this layer.  It has waited for the layers before."""
        if self._marks and layer in self._marks:
            self.copies.wait(self._marks.pop(layer))

    def settle(self) -> None:
        """Let the model's stream wait for the pages of all layers."""
        if self._marks:
            *_, last = self._marks.values()  # copies are made in their order
            self.copies.wait(last)
            self._marks.clear()


class LandedAttention:
    """A backend that reads a layer when what comes back to it has landed; it can be captured as the backend can.

    A graph that holds its ``attend`` waits for nothing when it is replayed: ``settle`` comes before that."""

    def __init__(self, backend: AttentionBackend, landings: Landings) -> None:
        self._backend = backend
        self._write = writer_of(backend)
        self._landings = landings
        self.capturable = is_capturable(backend)
        if isinstance(backend, GraphAttentionBuilder):
            self.for_graph = backend.for_graph

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan a step."""
        self._backend.plan_step(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Wait for the layer's pages, then attend."""
        self._landings.wait_for(layer)
        return self._backend.attend(layer, q_TNH)

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Wait for the layer's pages, then attend into a tensor."""
        self._landings.wait_for(layer)
        self._write(layer, q_TNH, out_TNH)


class LandedDecodes:
    """Whole decode steps that begin when all pages have landed; the rest of it is the captured steps'."""

    def __init__(self, captured: CapturedDecodes, landings: Landings) -> None:
        self._captured = captured
        self._landings = landings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def tell(self, step: Step) -> None:
        """Wait, and take in what has changed since the last step."""
        self._landings.settle()
        self._captured.tell(step)
