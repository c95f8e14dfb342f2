"""Pages that are on their way back from host memory while the model already runs: a layer waits for its own.

Legend: T new tokens in the step (ragged, packed) · N query heads · H head size
Owns: which layers must wait, and the waiting.  Does not know: pages, how they are copied.
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
    """The queued copies that no layer has waited for, by the first layer that needs each."""

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self._marks: dict[int, Mark] = {}

    def expect(self, layer: int, mark: Mark) -> None:
        """Make ``layer`` and those after it wait for ``mark`` before they read.  Called in the order of layers."""
        self._marks.pop(layer, None)
        self._marks[layer] = mark

    def wait_for(self, layer: int) -> None:
        """Make the model's stream wait for the pages of this layer.  It has waited for the layers before."""
        if self._marks and layer in self._marks:
            self.copies.wait(self._marks.pop(layer))

    def settle(self) -> None:
        """Make the model's stream wait for the pages of all layers."""
        if self._marks:
            *_, last = self._marks.values()  # copies are made in their order
            self.copies.wait(last)
            self._marks.clear()


class LandedAttention:
    """A backend that reads a layer after its pages have landed.  It is as capturable as the backend.

    A graph that holds its ``attend`` waits for nothing when it is replayed: call ``settle`` before that."""

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
    """Captured decode steps that begin when all pages have landed; other attributes are those of the captured steps."""

    def __init__(self, captured: CapturedDecodes, landings: Landings) -> None:
        self._captured = captured
        self._landings = landings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def apply(self, step: Step) -> None:
        """Wait for all pages, then take in the changes since the last step."""
        self._landings.settle()
        self._captured.apply(step)
