"""The actions of a replayed planner and their reasons, in words.

Owns: the sentences.  Does not know: where turns come from, how a sentence is shown.
"""

import numpy as np

from engine.features.recording.turns import of_messages
from engine.kv.eviction import Candidate
from engine.messages import FeatureAnswer, FeatureRequest, Step
from engine.scheduling.events import PlannerWatcher, Why
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.planner import Planner
from engine.scheduling.rows import Sequence

WAITS: dict[Why, str] = {
    "aside": "waits for a prefix that another request is computing",
    "fetch": "waits for pages from the store",
    "encode": "waits for its pictures",
    "weights": "waits until its adapter is read",
}


class Reasons(PlannerWatcher):
    """Sentences about one planner, which it watches."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._sentences: list[str] = []
        self._waits = ""
        planner.watch(self)

    def take(self) -> list[str]:
        """Return the sentences since the last call."""
        sentences, self._sentences = self._sentences, []
        return sentences

    # ---- events -----------------------------------------------------------------------------

    def waits(self, sequence: Sequence, why: Why) -> None:
        if why in WAITS:
            self._sentences.append(f"request {sequence.request_id} {WAITS[why]}")
        elif why == "no_room":
            waits = f"request {sequence.request_id} is first and waits: {self._needs(sequence)}"
            if waits != self._waits:
                self._sentences.append(waits)
            self._waits = waits

    def _needs(self, sequence: Sequence) -> str:
        pages, count, size = self.planner.pages, len(sequence.tokens), self.planner.table.page_size
        cached = pages.num_cached_tokens(sequence)
        new = -(-count // size) - cached // size
        return (
            f"{count} tokens, {cached} of them cached, need {new} pages and room to grow; {pages.num_available} are "
            "available"
        )

    def started(self, sequence: Sequence, *, is_first: bool) -> None:
        table, row = self.planner.table, sequence.row
        self._sentences.append(
            f"request {sequence.request_id} starts in row {row}: {len(sequence.tokens)} tokens, "
            f"{table.num_shared[row] * table.page_size} of them cached, in {table.num_pages[row]} pages; "
            f"{self.planner.pages.num_available} are still available"
        )
        self._waits = ""

    def evicted(self, request_id: int, candidate: Candidate) -> None:
        self._sentences.append(
            f"{candidate.num_pages} cached pages evicted for request {request_id}: the strategy ranks them lowest"
        )

    def retracted(self, sequence: Sequence) -> None:
        self._sentences.append(
            f"request {sequence.request_id} loses its row and waits again: pages are short, the weights change, or it "
            f"is isolated; it is the youngest of the least urgent (priority {sequence.priority})"
        )

    def finished(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        where = f"row {sequence.row}" if sequence.row >= 0 else "the queue"
        self._sentences.append(
            f"request {sequence.request_id} ends in {where}: {metrics.finish.name}, {metrics.num_output_tokens} tokens "
            "of output"
        )

    # ---- plans ------------------------------------------------------------------------------

    def of(self, plan: Step | FeatureRequest) -> str:
        """Return a plan as one line of text."""
        if isinstance(plan, FeatureRequest):
            return sentence_of(plan)
        decodes, rows = _ints(plan.decode_rows), _ints(plan.prefill_rows)
        parts = [f"{len(decodes)} rows decode"] if len(decodes) else []
        segments = zip(rows, _ints(plan.prefill_starts), _ints(plan.prefill_lengths), strict=True)
        for (row, start, length), samples in zip(segments, _ints(plan.prefill_samples), strict=True):
            end = " to its end" if samples == 1 else f", {samples - 1} of them proposed" if samples else ""
            parts.append(
                f"request {self.planner.table.request_ids[row]} (row {row}) computes {start}:{start + length}{end}"
            )
        if plan.table_pages:
            parts.append(f"{len(plan.table_pages) // 4} pages appended or replaced")
        if plan.parts:
            parts.append(f"with a part of {' and '.join(sorted(plan.parts))}")
        return f"step {plan.step_id}: {', '.join(parts)}"


def sentence_of(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message between the halves of a feature as one line of text."""
    name, sentences = message.feature, of_messages("sentence")
    return f"{name}: {sentences[name](message) if name in sentences else message.number}"


def _ints(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype=np.int32)
