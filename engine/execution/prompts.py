"""Results that some requests want of their prompts, in addition to tokens, and the readers that compute them.

Legend: T new tokens in the step · P positions whose states are wanted · D model dim
Owns: the hooks of a reader, the positions of a step that readers want.  Does not know: sampling, which readers exist.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.execution.batch import Batch
from engine.messages import Admission, Step
from engine.models.model import Model

Int64 = npt.NDArray[np.int64]
Columns = dict[str, Mapping[int, Any]]  # field of ``StepExtras`` -> row -> its value


class PromptResult(Protocol):
    """One reader's result of a step, on the device, or on the host when an event is reached."""

    def to_host(self) -> Self:
        """Queue the copies; read them only after an event recorded after this call."""
        ...

    def columns(self) -> Columns:
        """Return the columns for the step's extras.  It is called once, when the device is done with the step."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """The states that a reader wants of a step.

    at_P: indexes in T.  read: called with states_PD, the inputs of ``Model.logits`` there."""

    at_P: Int64
    read: Callable[[Tensor, Model], PromptResult]


class PromptSegment(NamedTuple):
    """A part of a row's prompt in a step.

    at: index in T of its first token.  start: that token's position in the prompt.  ends: whether the row samples."""

    row: int
    at: int
    start: int
    length: int
    ends: bool


class PromptReader(Protocol):
    """A part that reads the states of prompts: log probabilities, embeddings."""

    def admit(self, admission: Admission) -> bool:
        """Note the wishes of a sequence that takes a row, in place of the last one's.  Return whether it has any."""
        ...

    def wanted(self, segments: list[PromptSegment]) -> Wanted | None:
        """Return the states that it wants; None for none.  segments: of rows with wishes, maybe another reader's."""
        ...

    def sums(self, row: int) -> bool:
        """Return whether a step with the row's prompt must not run twice, since it adds to a sum."""
        ...


@dataclass(frozen=True, slots=True)
class WantedStates:
    """The states that all readers want of a step."""

    at_P: Int64
    parts: tuple[Wanted, ...]

    def read(self, states_PD: Tensor, model: Model) -> tuple[PromptResult, ...]:
        """Return the readers' results.  states_PD: the model's states at the positions."""
        parts = states_PD.split([len(one.at_P) for one in self.parts])
        return tuple(one.read(part, model) for one, part in zip(self.parts, parts, strict=True))


class Prompts:
    """The rows that want results of their prompts, from their admission on.

    rows: rows with such a wish when they were last admitted -> number of prompt tokens.  While it is empty, only
    ``admit`` needs to be called, for sequences with a wish."""

    def __init__(self, readers: Iterable[PromptReader]) -> None:
        self.rows: dict[int, int] = {}
        self._readers = tuple(readers)

    def admit(self, admission: Admission) -> None:
        """Note the wishes of a sequence that takes a row."""
        self.rows.pop(admission.row, None)
        for reader in self._readers:
            if reader.admit(admission):
                self.rows[admission.row] = admission.num_prompt_tokens

    def reads(self, step: Step) -> bool:
        """Return whether the step computes tokens of a prompt with a wish, and not only tokens behind it."""
        rows, starts = (np.frombuffer(one, dtype=np.int32).tolist() for one in (step.prefill_rows, step.prefill_starts))
        return any(start < self.rows.get(row, 0) for row, start in zip(rows, starts, strict=True))

    def wanted(self, step: Step, batch: Batch) -> WantedStates | None:
        """Return the states that a step must return; None if there are none, which costs next to nothing."""
        if not self.rows or not step.prefill_rows or not (segments := list(_segments(step, batch, self.rows))):
            return None
        parts = tuple(one for reader in self._readers if (one := reader.wanted(segments)) is not None)
        return WantedStates(np.concatenate([one.at_P for one in parts]), parts) if parts else None

    def sums_in(self, step: Step) -> bool:
        """Return whether the step adds to a sum, so that it must not run twice."""
        rows = np.frombuffer(step.prefill_rows, dtype=np.int32).tolist() if self.rows else ()
        return any(row in self.rows and reader.sums(row) for row in rows for reader in self._readers)


def _segments(step: Step, batch: Batch, rows: Container[int]) -> Iterator[PromptSegment]:
    """Yield the step's prefill segments of these rows."""
    columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths, step.prefill_samples)
    every = zip(*(np.frombuffer(one, dtype=np.int32).tolist() for one in columns), strict=True)
    for number, (row, start, length, samples) in enumerate(every):
        if row in rows:
            at = int(batch.query_starts_B1[batch.num_decodes + number])
            yield PromptSegment(row, at, start, length, samples == 1)
