"""The shrinking of a recording that fails to a short one that fails the same way.

Owns: the operations that a recording stands for, and how those that are left are played.
Does not know: how the search goes (``shrink.py``), files.

When something is left out, other steps are planned than the recorded ones, and their recorded results no longer fit.
So a result is an operation too, "the oldest step in flight is done", and a device without a model answers: with the
tokens that each request had at these positions.  What is played in the end is recorded anew, and replays by itself.
"""

import re
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from engine.actors.inboxes import SchedulerInbox
from engine.features.recording.file import Recording
from engine.features.recording.invariants import Invariants
from engine.features.recording.replay import new_scheduler, play
from engine.features.recording.replayed import ReplayedScheduler
from engine.features.recording.shrink import shrink
from engine.features.recording.turns import Turn, of_messages
from engine.messages import Admit, FeatureAnswer, FeatureRequest, Step, StepDone, StepExtras
from engine.plugins.manager import Plugins
from engine.types.notices import ExecutorsLost, ExecutorsReady, Reconfigure

Place = tuple[int, int]  # a request, and a position in its sequence


@dataclass(frozen=True, slots=True)
class Op:
    """A message of the recording.  at: seconds of its clock.  ends_turn: plans were made after it."""

    message: SchedulerInbox
    at: float
    ends_turn: bool = False


@dataclass(slots=True)
class Story:
    """The content of a recording.

    tokens, extras: results of the executors, by place.  parts: those of features, by place and name.
    early: their answers to plans made before it begins.
    fault: the fault with which it ends, '' for none."""

    ops: list[Op] = field(default_factory=list)
    tokens: dict[Place, int] = field(default_factory=dict)
    extras: dict[Place, StepExtras] = field(default_factory=dict)
    parts: dict[Place, dict[str, Any]] = field(default_factory=dict)
    early: list[StepDone | FeatureAnswer] = field(default_factory=list)
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step that waits for an answer.  places: the place of each of its samples."""

    step_id: int
    places: list[Place]


class _Device:
    """A replacement of all ranks.  It knows what is in flight, and to which request a sample belongs."""

    def __init__(self, scheduler: ReplayedScheduler) -> None:
        self.steps: dict[int, deque[_Asked | StepDone]] = defaultdict(deque)  # by rank
        self.requests: dict[int, deque[FeatureRequest | FeatureAnswer]] = defaultdict(deque)
        self.scheduler = scheduler
        scheduler.on_plan = self._planned

    def _planned(self, plan: Step | FeatureRequest) -> None:
        for rank in range(self.scheduler.num_ranks):
            if isinstance(plan, Step):
                self.steps[rank].append(_Asked(plan.step_id, list(self._places(plan))))
            else:
                self.requests[rank].append(plan)

    def _places(self, step: Step) -> Iterator[Place]:
        planner = self.scheduler.planner
        assert planner is not None
        table = planner.table
        for row in _ints(step.decode_rows):
            yield int(table.request_ids[row]), int(table.num_computed[row])
        columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths, step.prefill_samples)
        for row, start, length, samples in zip(*map(_ints, columns), strict=True):
            for nth in range(samples):
                yield int(table.request_ids[row]), start + length - samples + nth + 1

    def forget(self) -> None:
        """Forget everything in flight: the executors are lost."""
        self.steps.clear()
        self.requests.clear()


def story_of(recording: Recording, plugins: Plugins | None = None) -> Story:
    """Play a recording and return its story.  Its operations end with the turn that fails, if one does."""
    scheduler, invariants, story = new_scheduler(recording, plugins), Invariants(), Story()
    device = _Device(scheduler)
    at = 0.0
    for turn in recording.turns:
        at = float(_floats(turn.readings)[0]) if turn.readings else at
        for number, message in enumerate(turn.messages):
            story.ops.append(Op(message, at, number == len(turn.messages) - 1))
            _listen(story, device, message)
        _, story.fault = play(scheduler, invariants, turn)
        if story.fault:
            break
    return story


def _listen(story: Story, device: _Device, message: SchedulerInbox) -> None:
    """Add the results in a message to the story."""
    if isinstance(message, ExecutorsLost):
        device.forget()
    elif isinstance(message, FeatureAnswer):
        asked = device.requests[message.rank]
        asked.popleft() if asked else story.early.append(message)
    elif isinstance(message, StepDone):
        steps = device.steps[message.rank]
        if not steps or steps[0].step_id != message.step_id:
            story.early.append(message)
            return
        step = steps.popleft()
        assert isinstance(step, _Asked)
        planner = device.scheduler.planner
        assert planner is not None
        story.tokens.update(zip(step.places, _ints(message.token_ids), strict=True))
        firsts = dict(reversed(step.places))
        for row, extras in message.extras.items():
            request = int(planner.table.request_ids[row])
            if request in firsts:
                story.extras[request, firsts[request]] = extras
        for name, result_by_row in of_messages("result_by_row").items():
            for row, result in result_by_row(message.parts[name]).items() if name in message.parts else ():
                request = int(planner.table.request_ids[row])
                if request in firsts:
                    story.parts.setdefault((request, firsts[request]), {})[name] = result


def play_ops(
    recording: Recording, story: Story, ops: list[Op], plugins: Plugins | None = None
) -> tuple[str, list[Turn]]:
    """Play operations of a story.  Return the fault, '' for none, and the turns up to there."""
    scheduler, invariants = new_scheduler(recording, plugins), Invariants()
    device = _Device(scheduler)
    if recording.state:
        for early in story.early:
            (device.steps if isinstance(early, StepDone) else device.requests)[early.rank].append(early)  # type: ignore[arg-type]
    turns: list[Turn] = []
    messages: list[SchedulerInbox] = []
    for op in ops:
        if (message := _message_now(story, device, scheduler, op.message)) is not None:
            messages.append(message)
        # Two results in one turn may be of one step each: the step of the second one is planned after the first.
        if messages and (op.ends_turn or isinstance(op.message, StepDone | ExecutorsLost)):
            turn, messages = Turn(tuple(messages), array("d", [op.at]).tobytes()), []
            plans, fault = play(scheduler, invariants, turn)
            turns.append(msgspec.structs.replace(turn, plans=plans, failure=fault))
            if fault:
                return fault, turns
    return "", turns


def _message_now(
    story: Story, device: _Device, scheduler: ReplayedScheduler, message: SchedulerInbox
) -> SchedulerInbox | None:
    """Return the message of an operation as it is now; None if it has no place any more."""
    if isinstance(message, ExecutorsReady):
        return None if scheduler.is_ready else message
    if isinstance(message, Reconfigure):
        return message
    if scheduler.planner is None:
        return None
    if isinstance(message, ExecutorsLost):
        device.forget()
        return message if scheduler.is_ready else None
    if isinstance(message, FeatureAnswer):
        if not (asked := device.requests[message.rank]):
            return None
        return msgspec.structs.replace(message, number=asked.popleft().number)
    if isinstance(message, StepDone):
        if not (steps := device.steps[message.rank]):
            return None
        step = steps.popleft()
        return step if isinstance(step, StepDone) else _answer(story, scheduler, message.rank, step)
    return message


def _answer(story: Story, scheduler: ReplayedScheduler, rank: int, step: _Asked) -> StepDone:
    planner = scheduler.planner
    assert planner is not None
    tokens, extras = [], {}
    parts: dict[str, dict[int, Any]] = {}
    for request, position in step.places:
        sequence = planner.requests.open.get(request)
        stops = sequence.stop_ids if sequence is not None else ()
        token = story.tokens.get((request, position))
        tokens.append(next(one for one in range(len(stops) + 1) if one not in stops) if token is None else token)
        if sequence is not None and sequence.row >= 0 and (told := story.extras.get((request, position))) is not None:
            extras[sequence.row] = told
        if sequence is not None and sequence.row >= 0:
            for name, result in story.parts.get((request, position), {}).items():
                parts.setdefault(name, {})[sequence.row] = result
    of_rows = of_messages("result_of_rows")
    return StepDone(
        rank=rank,
        step_id=step.step_id,
        token_ids=np.array(tokens, dtype=np.int32).tobytes(),
        extras=extras,
        parts={name: of_rows[name](by_row) for name, by_row in parts.items()},
    )


def shrunk(recording: Recording, limit_s: float, plugins: Plugins | None = None) -> tuple[Recording, str, int] | None:
    """Return the shortest recording found within ``limit_s`` seconds that fails as this one does; None if it passes.

    The result has the recording, its fault, and the number of operations before shrinking."""
    story = story_of(recording, plugins)
    if not story.fault:
        return None
    kind, ops = _kind(story.fault), story.ops
    if recording.state:
        # Without the state it begins with an empty pool: mostly that is enough, and much shorter.
        bare = replace(recording, state=[])
        num_pages = new_scheduler(recording, plugins).num_pages
        begun = [Op(ExecutorsReady(num_pages=num_pages), ops[0].at if ops else 0.0, True), *ops]
        if _kind(play_ops(bare, story, begun, plugins)[0]) == kind:
            recording, ops = bare, begun

    def fails(ops: list[Op]) -> bool:
        return _kind(play_ops(recording, story, ops, plugins)[0]) == kind

    def fewest(ops: list[Op], limit_s: float) -> list[Op]:
        numbers, _ = shrink(list(range(len(ops))), [0], lambda left, _: fails([ops[one] for one in left]), limit_s)
        return [ops[number] for number in numbers]

    if not fails(ops):  # the fault depends on the recording's own timing
        return None
    ends_at = time.monotonic() + limit_s
    ops = fewest(ops, 0.8 * limit_s)
    for number in range(len(ops)):
        for shorter in _shorter(ops[number]):
            if time.monotonic() < ends_at and fails(tried := [*ops[:number], shorter, *ops[number + 1 :]]):
                ops = tried
                break
    # Shorter outputs need fewer steps.
    ops = fewest(ops, max(0.0, ends_at - time.monotonic()))
    fault, turns = play_ops(recording, story, ops, plugins)
    why = f"shrunk from {len(story.ops)} operations: {fault}"
    header = msgspec.structs.replace(recording.header, why=why)
    return Recording(header, recording.state, turns), fault, len(story.ops)


def _shorter(op: Op) -> Iterator[Op]:
    """Yield the same request with fewer tokens of output, the fewest first."""
    message = op.message
    if isinstance(message, Admit):
        most = message.params.max_tokens
        for count in (1, 2, 4, 8, 16):
            if (most is None or count < most) and message.params.min_tokens <= count:
                params = msgspec.structs.replace(message.params, max_tokens=count)
                yield replace(op, message=msgspec.structs.replace(message, params=params))


def _kind(fault: str) -> str:
    """Return a fault without its numbers, which change when something is left out."""
    return re.sub(r"[\d\[\], ]+", " ", fault)[:100]


def _ints(raw: bytes) -> list[int]:
    ints: list[int] = np.frombuffer(raw, dtype=np.int32).tolist()
    return ints


def _floats(raw: bytes) -> list[float]:
    floats: list[float] = np.frombuffer(raw, dtype=np.float64).tolist()
    return floats
