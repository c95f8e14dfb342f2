"""The explanation of one request's time in the engine, computed when it is requested.

Owns: the parts into which the time is cut, and the other requests that had a share in each.
Does not know: text, HTTP, what requests are called outside.
The parts cover the time from a request's arrival to its end, or to now, without gaps and without overlaps.  A request's
marks cut it into states; time in which it decoded is cut by the steps that ended in it.  A step that took longer than
the median of steps with as many rows and no prompt is explained by what else was in it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.features.explain.session_turns import TurnDifference
from engine.features.explain.timelines import Mark, State, Timelines
from engine.messages import Finish
from engine.scheduling.requests import Requests
from engine.types.versions import NOTE, versions

MOST_NAMED = 5  # other requests, per part
WIDE = 1024  # steps before and after a request's own, which show how long steps usually take
SLOW = 1.5  # times as long as usual, if nothing else is known of a step
WAITS: frozenset[State] = frozenset({"queue", "no_room", "aside"})
HOLDING: frozenset[State] = frozenset({"prefill", "decode"})

PartName = Literal[
    "queue", "fetch", "encode", "weights", "prefill", "decode", "prefills", "slow_steps", "retraction", "recovery"
]
Floats = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]


class TimeShare(msgspec.Struct, frozen=True):
    """A share of a request's time.

    others: requests that had to do with it, largest share first, each with its amount: seconds that it held a row in
    'queue', tokens of its prompt in 'prefill' and 'prefills'.
    reasons: known causes, as name -> seconds, or as name -> count."""

    name: PartName
    seconds: float
    reasons: dict[str, float] = {}
    others: tuple[tuple[int, float], ...] = ()


class Explained(msgspec.Struct, frozen=True):
    """A request's time in the engine.

    arrived_at: seconds of the planner's clock.
    until: its end, or now, by the same clock.
    grammar_s: time that its grammar took to compile before it arrived here.
    missed: request -> cached pages that its start evicted and this one computed again.
    finish: 0 while it runs.
    num_output_tokens: None while it runs.
    num_recomputed: cached tokens that it computed again for want of a state behind them.
    difference: the place in which its prompt differs from a turn of its session.
    weight_versions: (n, version): its tokens from the n-th on are of that version; none for the first weights."""

    request_id: int
    arrived_at: float
    until: float
    finish: Finish
    grammar_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int | None
    num_retractions: int
    missed: dict[int, int]
    parts: tuple[TimeShare, ...]
    num_recomputed: int = 0
    difference: TurnDifference | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()


class StateSpan(NamedTuple):
    """A state of a request.  cause: the event that took its row away, until it decodes again."""

    state: State
    cause: Literal["", "retraction", "recovery"]
    start: float
    end: float


class _Known(NamedTuple):
    """The times and marks of a request, whether it has ended or not."""

    arrived_at: float
    until: float
    finish: Finish
    marks: tuple[Mark, ...]


def explain(requests: Requests, timelines: Timelines, request_id: int, now: float) -> Explained | None:
    """Return the explanation of a request; None if nothing is kept of it.  now: seconds of the planner's clock."""
    num_output: int | None = None
    timeline, sequence = timelines.ended.get(request_id), requests.open.get(request_id)
    if timeline is not None:
        one, missed, grammar_s = timeline.metrics, timeline.missed, timeline.grammar_s
        num_recomputed, difference, marks = timeline.num_recomputed, timeline.difference, timeline.versions
        num_output, cached, num_retractions = one.num_output_tokens, one.cached_tokens, one.num_retractions
        num_prompt = one.num_prompt_tokens
    elif sequence is not None:
        line = timelines.open[request_id]
        missed, grammar_s, num_retractions = dict(line.missed), line.grammar_s, sequence.num_retractions
        num_prompt, cached = sequence.num_prompt, max(0, sequence.num_cached_at_start)
        num_recomputed, difference, marks = line.num_recomputed, line.difference, sequence.notes.get(NOTE, b"")
    else:
        return None
    known = dict(_all_known(requests, timelines, now))
    account = _Account(requests, timelines, known, request_id)
    own = known[request_id]
    return Explained(
        request_id=request_id,
        arrived_at=own.arrived_at,
        until=own.until,
        finish=own.finish,
        grammar_s=grammar_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=cached,
        num_output_tokens=num_output,
        num_retractions=num_retractions,
        missed=missed,
        parts=tuple(account.parts()),
        num_recomputed=num_recomputed,
        difference=difference,
        weight_versions=tuple(versions(marks)),
    )


def _all_known(requests: Requests, timelines: Timelines, now: float) -> Iterator[tuple[int, _Known]]:
    for request_id, (metrics, marks, *_) in timelines.ended.items():
        arrived = metrics.arrived_at
        yield request_id, _Known(arrived, arrived + metrics.e2e_s, metrics.finish, marks)
    for request_id, one in requests.open.items():
        yield request_id, _Known(one.arrived_at, now, Finish.RUNNING, tuple(timelines.open[request_id].marks))


def spans(marks: tuple[Mark, ...], arrived_at: float, until: float) -> Iterator[StateSpan]:
    """Yield the states of a request, one after the other, from its arrival on."""
    cause: Literal["", "retraction", "recovery"] = ""
    at = arrived_at
    state: State = "queue"
    for mark in (*marks, None):
        end = until if mark is None else min(max(mark.at, at), until)
        if end > at:
            yield StateSpan(state, cause, at, end)
        if mark is None:
            return
        at, state = end, mark.state
        match state:
            case "retracted":
                cause = "retraction"
            case "lost":
                cause = "recovery"
            case "decode":
                cause = ""


class _Account:
    """The computation of one request's explanation."""

    def __init__(self, requests: Requests, timelines: Timelines, known: Mapping[int, _Known], request_id: int) -> None:
        self._limits = requests.limits
        self._losses = timelines.losses
        self._log = timelines.steps
        self._known = known
        self._id = request_id
        self._own = known[request_id]
        self._seconds: defaultdict[PartName, float] = defaultdict(float)
        self._reasons: dict[PartName, defaultdict[str, float]] = {}
        self._others: dict[PartName, dict[int, float]] = {}
        self._steps = self._near_steps()

    def _near_steps(self) -> Records:
        """Return the steps of its time, and some around them."""
        steps = self._log.steps.records()
        first, last = np.searchsorted(steps["completed_at"], (self._own.arrived_at, self._own.until))
        return steps[max(0, first - WIDE) : last + WIDE]

    def parts(self) -> Iterator[TimeShare]:
        """Yield the parts that took any time, in the order in which a request meets them."""
        own = self._own
        cut = list(spans(own.marks, own.arrived_at, own.until))
        for span, following in pairwise((*cut, StateSpan("queue", "", own.until, own.until))):
            self._add(span, is_lost=following.cause == "recovery" and not span.cause)
        self._look_around([(span.start, span.end) for span in cut if span.state in WAITS and not span.cause])
        names: tuple[PartName, ...] = PartName.__args__  # type: ignore[attr-defined]
        for name in names:
            if self._seconds[name] > 0:
                others = nlargest(MOST_NAMED, self._others.get(name, {}).items(), key=itemgetter(1))
                yield TimeShare(name, self._seconds[name], dict(self._reasons.get(name, ())), tuple(others))

    def _of(self, name: PartName) -> defaultdict[str, float]:
        return self._reasons.setdefault(name, defaultdict(float))

    def _note(self, name: PartName, seconds: float, reason: str = "") -> None:
        self._seconds[name] += seconds
        if reason:
            self._of(name)[reason] += seconds

    def _add(self, span: StateSpan, *, is_lost: bool) -> None:
        """Add a span.  is_lost: its executors are lost at its end, which is noticed some time after their last step."""
        start, end = span.start, span.end
        if is_lost:
            completed = self._within(start, end)["completed_at"]
            last = float(completed[-1]) if len(completed) else start
            self._note("recovery", end - last, "unnoticed")
            end = last
        if span.cause == "recovery":
            self._note("recovery", end - start, "again" if span.state in HOLDING else "waiting")
        elif span.cause == "retraction":
            self._note("retraction", end - start, "again" if span.state in HOLDING else "waiting")
        elif span.state == "decode":
            self._decode(start, end)
        elif span.state == "prefill":
            self._prefill(start, end)
        elif span.state in ("fetch", "encode", "weights"):
            self._note(span.state, end - start)
        else:
            gone = sum(max(0.0, min(end, until) - max(start, since)) for since, until in self._losses)
            if gone:
                self._note("recovery", gone, "waiting")
            self._note("queue", end - start - gone)
            if span.state == "aside":
                self._of("queue")["aside"] += end - start

    def _within(self, start: float, end: float) -> Records:
        """Return the steps that ended in that time."""
        first, last = np.searchsorted(self._steps["completed_at"], (start, end), side="right")
        return self._steps[first:last]

    # ---- waiting ----------------------------------------------------------------------------

    def _look_around(self, waits: list[tuple[float, float]]) -> None:
        """Find the requests that held rows while this one waited for a row, and whether rows or pages were short."""
        if not waits:
            return
        start, end = waits[0][0], waits[-1][1]
        changes: list[tuple[float, int, int]] = []  # time, change of rows, change of requests that lack pages
        held: defaultdict[int, float] = defaultdict(float)
        overtaken: set[int] = set()
        for request_id, one in self._known.items():
            if one.until <= start or one.arrived_at >= end:
                continue
            for span in spans(one.marks, one.arrived_at, one.until):
                first, last = max(span.start, start), min(span.end, end)
                if first >= last:
                    continue
                if span.state == "no_room":
                    changes += [(first, 0, 1), (last, 0, -1)]
                elif span.state in HOLDING and request_id != self._id:
                    changes += [(first, 1, 0), (last, -1, 0)]
                    overlap = sum(max(0.0, min(last, b) - max(first, a)) for a, b in waits)
                    if overlap > 0:
                        held[request_id] += overlap
                    if one.arrived_at > self._own.arrived_at:
                        overtaken.add(request_id)
        self._others["queue"] = held
        reasons = self._of("queue")
        rows = short = 0
        at = start
        for when, more_rows, more_short in (*sorted(changes), (end, 0, 0)):
            what = "rows" if rows >= self._limits.max_running else "pages" if short else ""
            if what:
                reasons[what] += sum(max(0.0, min(when, b) - max(at, a)) for a, b in waits)
            at, rows, short = when, rows + more_rows, short + more_short
        if overtaken:
            reasons["overtaken_by"] = len(overtaken)
        reasons["running"] = len(held)
        reasons["steps"] = sum(len(self._within(since, until)) for since, until in waits)

    # ---- computing --------------------------------------------------------------------------

    def _prefill(self, start: float, end: float) -> None:
        steps = self._within(start, end)
        chunks = self._chunks(steps)
        mine = np.isin(steps["step_id"], chunks["step_id"][chunks["request_id"] == self._id])
        computing = float((steps["completed_at"] - np.maximum(steps["began_at"], start))[mine].sum())
        self._note("prefill", end - start)
        reasons = self._of("prefill")
        reasons["computing"] += computing
        reasons["steps"] += int(mine.sum())
        reasons["tokens"] += int(chunks["num_tokens"][chunks["request_id"] == self._id].sum())
        self._name("prefill", chunks)

    def _decode(self, start: float, end: float) -> None:
        steps = self._within(start, end)
        if not len(steps):
            self._note("decode", end - start)
            return
        edges = np.concatenate(((start,), steps["completed_at"]))
        took: Floats = np.diff(edges)
        mixed = steps["num_prefill_tokens"] > 0
        usual = self._usual(steps["num_decodes"])
        is_slow = mixed | (took > SLOW * usual)
        excess = np.where(is_slow, np.maximum(took - usual, 0.0), 0.0)
        # The first interval may reach back before the oldest step in the log.
        excess[0] = excess[0] if self._steps[0]["step_id"] < steps[0]["step_id"] else 0.0
        self._note("decode", end - start - float(excess.sum()))
        reasons = self._of("decode")
        reasons["steps"] += len(steps)
        beside = float(excess[mixed].sum())
        if beside > 0:
            self._note("prefills", beside)
            self._of("prefills")["steps"] += int(mixed.sum())
            self._name("prefills", self._chunks(steps))
        gaps = steps["began_at"] - edges[:-1]
        for index in np.flatnonzero((excess > 0) & ~mixed).tolist():
            step, seconds = steps[index], float(excess[index])
            if step["note"]:
                reason = self._log.notes[step["note"]]
            elif step["num_copied"]:
                reason = "copies"
            elif gaps[index] > seconds / 2:
                reason = "host"
            else:
                reason = "device"
            self._note("slow_steps", seconds, reason)

    def _usual(self, num_rows: npt.NDArray[np.int32]) -> Floats:
        """Return the usual seconds between two steps with so many rows and no prompt."""
        steps = self._steps
        took = np.diff(steps["completed_at"])
        plain = (steps["num_prefill_tokens"][1:] == 0) & (np.diff(steps["step_id"]) == 1)
        plain &= steps["num_decodes"][:-1] > 0
        rows, took = steps["num_decodes"][1:][plain], took[plain]
        if not len(rows):
            return np.full(len(num_rows), np.inf)
        order = np.argsort(rows, kind="stable")
        sizes, firsts = np.unique(rows[order], return_index=True)
        medians = [float(np.median(part)) for part in np.split(took[order], firsts[1:])]
        return np.interp(num_rows, sizes, medians)

    def _chunks(self, steps: Records) -> Records:
        """Return the chunks of prompts that were computed in steps."""
        chunks = self._log.chunks.records()
        if not len(steps):
            return chunks[:0]
        first, last = np.searchsorted(chunks["step_id"], (steps["step_id"][0], steps["step_id"][-1] + 1))
        return chunks[first:last]

    def _name(self, name: PartName, chunks: Any) -> None:
        """Add the other requests' prompt tokens in chunks to a part."""
        others = self._others.setdefault(name, {})
        for request_id, count in zip(chunks["request_id"].tolist(), chunks["num_tokens"].tolist(), strict=True):
            if request_id != self._id:
                others[request_id] = others.get(request_id, 0) + count
