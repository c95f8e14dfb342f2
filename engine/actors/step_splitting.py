"""Splitting of steps that are too large for the device, until the parts fit.

Owns: cutting a step in two, merging the results, and the largest size that fits.  Does not know: torch, memory.
A single rank cuts a step after it has failed.  Ranks that run collectives must all cut alike, and the others may be
waiting in the middle of the step: there it is an error with the step's size, and all restart with a limit.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.actors.runner import Answer, PendingStep, Runner
from engine.messages import FeatureRequest, Step, StepDone, StepExtras
from engine.types.errors import StepTooLarge
from engine.types.logprobs import PromptLogprobs
from engine.types.notices import Profile
from engine.types.spans import PART, spans_of

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int32]
IN_PARTS = "were cut into parts, since the device has no room for them in one"


class StepSplitter:
    """A runner that survives ``MemoryError`` if a smaller step fits: it launches the step's batch in parts.

    A size that did not fit is not tried again, so that later steps do not fail first.
    alone: it is the only rank.  most_tokens: steps with more tokens are cut; 0 for no limit."""

    def __init__(self, runner: Runner, *, alone: bool = True, most_tokens: int = 0) -> None:
        self.num_pages = runner.num_pages
        self._runner = runner
        self._alone = alone
        self._most_tokens = most_tokens

    def launch(self, step: Step) -> PendingStep:
        """Launch a step in as many parts as needed.

        Raises MemoryError if a part that cannot be cut does not fit, such as one token, and StepTooLarge if another
        step fails and the rank is not alone."""
        is_large = 0 < self._most_tokens < num_tokens(step)
        parts = halves(step) if is_large else None
        changes_made = parts is None
        if parts is None:
            try:
                return self._runner.launch(step)
            except MemoryError as error:
                if (parts := halves(step)) is None:
                    raise
                if not self._alone:
                    raise StepTooLarge(f"no room for a step of {num_tokens(step)} tokens", num_tokens(step)) from error
                self._note(num_tokens(step), error)
        first, second = parts
        if not changes_made:
            first = msgspec.structs.replace(step, **batch_of(first))
        return _StepParts([self.launch(first), self.launch(second)])

    def profile(self, ask: Profile) -> None:
        """Start or stop recording steps, as ``Runner.profile``."""
        self._runner.profile(ask)

    def receive(self, message: FeatureRequest, answer: Answer) -> None:
        """Pass the message to the runner."""
        self._runner.receive(message, answer)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()

    def leave(self) -> None:
        """Abort the communicator after a failure, as ``Runner.leave``."""
        self._runner.leave()

    def _note(self, num_tokens: int, error: MemoryError) -> None:
        self._most_tokens = num_tokens // 2
        log.warning(
            "the device has no room for a step of %d tokens; steps are cut to %d from now on (%s)",
            num_tokens,
            self._most_tokens,
            error,
        )


def num_tokens(step: Step) -> int:
    """Return the number of new tokens of a step's batch."""
    return len(step.decode_rows) // 4 + int(np.frombuffer(step.prefill_lengths, dtype=np.int32).sum())


def batch_of(step: Step) -> dict[str, bytes]:
    """Return the fields of a step that make up its batch; the others are changes, applied once."""
    names = ("decode_rows", "prefill_rows", "prefill_starts", "prefill_lengths", "prefill_samples")
    return {name: getattr(step, name) for name in names}


def halves(step: Step) -> tuple[Step, Step] | None:
    """Return two steps with the batch of one, in order, without its changes; None if there is no place for a cut.

    A prefill segment may be cut: its second part samples, and the first one the rest of a longer sample."""
    if not (room := _middle(step)):
        return None
    num_decodes = min(room, len(step.decode_rows) // 4)
    room -= num_decodes
    columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths, step.prefill_samples)
    rows, starts, lengths, samples = (np.frombuffer(column, dtype=np.int32) for column in columns)
    ends = np.cumsum(lengths)
    whole = int(np.searchsorted(ends, room, side="right")) if room else 0  # segments entirely in the first half
    taken = room - (int(ends[whole - 1]) if whole else 0)
    first = [rows[:whole], starts[:whole], lengths[:whole], samples[:whole]]
    second = [rows[whole:], starts[whole:], lengths[whole:], samples[whole:]]
    if taken:
        left = int(lengths[whole]) - taken
        parts = (rows[whole], starts[whole], taken, max(0, int(samples[whole]) - left))
        first = [np.append(column, np.int32(value)) for column, value in zip(first, parts, strict=True)]
        second[1:] = [column.copy() for column in second[1:]]
        second[1][0] += taken
        second[2][0] = left
        second[3][0] = min(int(samples[whole]), left)
    at = 4 * num_decodes
    return _step(step, step.decode_rows[:at], first), _step(step, step.decode_rows[at:], second)


def _middle(step: Step) -> int:
    """Return the number of tokens before a cut, about half of them, that divides no span; 0 if there is none."""
    size = num_tokens(step)
    columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths)
    rows, starts, lengths = (np.frombuffer(column, dtype=np.int32) for column in columns)
    shifts = len(step.decode_rows) // 4 + np.cumsum(lengths) - lengths - starts  # from a position to the step's token
    for span in spans_of(step.parts):
        for index in np.flatnonzero(rows == span.row).tolist():
            first = max(span.start, int(starts[index])) + int(shifts[index])
            last = min(span.end, int(starts[index] + lengths[index])) + int(shifts[index])
            if first < size // 2 < last:
                return first or last % size
    return size // 2


def _step(step: Step, decode_rows: bytes, columns: Sequence[Ints]) -> Step:
    rows, starts, lengths, samples = (column.astype(np.int32).tobytes() for column in columns)
    return Step(
        step_id=step.step_id,
        decode_rows=decode_rows,
        prefill_rows=rows,
        prefill_starts=starts,
        prefill_lengths=lengths,
        prefill_samples=samples,
        parts={PART: step.parts[PART]} if PART in step.parts else {},
    )


@dataclass(frozen=True, slots=True)
class _StepParts:
    """The launched parts of a step."""

    parts: list[PendingStep]

    def ready(self) -> bool:
        return all(pending.ready() for pending in self.parts)

    def collect(self) -> StepDone:
        """Wait for all parts and return one result."""
        return merged([pending.collect() for pending in self.parts])


def merged(results: Sequence[StepDone]) -> StepDone:
    """Return the result of a step from those of its parts, in order."""
    extras: dict[int, StepExtras] = {}
    for done in results:
        for row, one in done.extras.items():
            extras[row] = together(extras[row], one) if row in extras else one
    token_ids = b"".join(done.token_ids for done in results)
    parts = {name: part for done in results for name, part in done.parts.items()}  # the last one has the latest state
    return msgspec.structs.replace(results[0], token_ids=token_ids, extras=extras, note=IN_PARTS, parts=parts)


def together(first: StepExtras, later: StepExtras) -> StepExtras:
    """Return one row's extras of a step that was computed in two parts."""
    both = StepExtras(**{name: getattr(later, name) or getattr(first, name) for name in StepExtras.__struct_fields__})
    if first.logprobs is not None and later.logprobs is not None:
        others = (*first.later_logprobs, later.logprobs, *later.later_logprobs)
        both = msgspec.structs.replace(both, logprobs=first.logprobs, later_logprobs=others)
    if first.prompt_logprobs is None or later.prompt_logprobs is None:
        return both
    entries = first.prompt_logprobs.entries + later.prompt_logprobs.entries
    return msgspec.structs.replace(
        both, prompt_logprobs=PromptLogprobs(first=first.prompt_logprobs.first, entries=entries)
    )
