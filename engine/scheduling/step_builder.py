"""A step while it is planned: columns to which the planner's parts and its features append.

Owns: the order of a step's rows, and the record of what the step will bring.  Does not know: why a row is in a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Admission, Step, StepExtras
from engine.scheduling.rows import Rows, Sequence, TokenIds


@dataclass(frozen=True, slots=True)
class Appends:
    """Changes to page tables: rows, indexes in their page tables, pages."""

    rows: Rows
    indexes: Rows
    pages: Rows


NO_ROWS: Rows = np.zeros(0, dtype=np.int32)
NO_APPENDS = Appends(NO_ROWS, NO_ROWS, NO_ROWS)


class Wave(NamedTuple):
    """Sampled tokens of different rows, which are noted before those of the next wave.  extras: by row."""

    rows: Rows
    tokens: TokenIds
    extras: Mapping[int, StepExtras]


class Columns(NamedTuple):
    """Segments of a step, int32[S] each, with the names that ``Step`` has for them."""

    rows: Rows
    starts: Rows
    lengths: Rows
    samples: Rows


@dataclass(slots=True)
class Segments:
    """The prompts of a step, as they are planned.  started: sequences that got a row for it."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)

    def columns(self) -> Columns:
        """Return the segments as columns."""
        rows, starts, lengths, samples = map(column, (self.rows, self.starts, self.lengths, self.samples))
        return Columns(rows, starts, lengths, samples)


class InFlight(msgspec.Struct, frozen=True):
    """The expected result of a planned step.

    sampled_rows: the row of each sampled token, in the order of ``StepDone.token_ids``.
    num_decodes: number of them that decode.
    prefill_rows, prefill_ends: prompts in the step, and the number of tokens of each that are computed after it.
    num_extra_tokens: tokens of segments that features have inserted.
    notes: data that features keep of the step until it completes, by name."""

    sampled_rows: Rows
    num_decodes: int
    launched_at: float
    prefill_rows: tuple[int, ...] = ()
    prefill_ends: tuple[int, ...] = ()
    num_prefill_tokens: int = 0
    num_extra_tokens: int = 0
    num_copied: int = 0
    notes: Mapping[str, Any] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class StepBuilder:
    """One step under construction.

    decode_rows: rows that sample one token each.
    overlaps: a step before it is still in flight.
    prompts: the segments of prompts.  inserted: segments of features, which go before those.
    parts, filled_pages, num_copied: see ``Step``.  notes: as in ``InFlight``."""

    step_id: int
    launched_at: float
    decode_rows: Rows
    overlaps: bool
    appends: list[Appends] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    prompts: Columns | None = None
    inserted: Columns | None = None
    parts: dict[str, bytes] = field(default_factory=dict)
    filled_pages: list[bytes] = field(default_factory=list)
    num_copied: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens in the step."""
        return 0 if self.prompts is None else int(self.prompts.lengths.sum())

    def build(self) -> tuple[Step, InFlight]:
        """Return the step, and the record of its expected result."""
        appends = self._joined_appends()
        segments = self._segments()
        prompts, inserted = self.prompts, self.inserted
        sampled, columns = self.decode_rows, {}
        if segments is not None:
            sampled = np.concatenate((sampled, np.repeat(segments.rows, segments.samples)))
            columns = {f"prefill_{name}": column.tobytes() for name, column in segments._asdict().items()}
        record = InFlight(
            sampled_rows=sampled,
            num_decodes=len(self.decode_rows),
            launched_at=self.launched_at,
            prefill_rows=() if prompts is None else tuple(prompts.rows.tolist()),
            prefill_ends=() if prompts is None else tuple((prompts.starts + prompts.lengths).tolist()),
            num_prefill_tokens=self.num_prompt_tokens,
            num_extra_tokens=0 if inserted is None else int(inserted.lengths.sum()),
            num_copied=self.num_copied,
            notes=self.notes,
        )
        step = Step(
            step_id=self.step_id,
            admissions=tuple(self.admissions),
            table_rows=appends.rows.tobytes(),
            table_indexes=appends.indexes.tobytes(),
            table_pages=appends.pages.tobytes(),
            decode_rows=self.decode_rows.tobytes(),
            filled_pages=b"".join(self.filled_pages),
            num_copied=self.num_copied,
            parts=self.parts,
            **columns,
        )
        return step, record

    def _joined_appends(self) -> Appends:
        if len(self.appends) == 1:
            return self.appends[0]
        if not self.appends:
            return NO_APPENDS
        return Appends(
            np.concatenate([one.rows for one in self.appends]),
            np.concatenate([one.indexes for one in self.appends]),
            np.concatenate([one.pages for one in self.appends]),
        )

    def _segments(self) -> Columns | None:
        if self.prompts is None or self.inserted is None:
            return self.inserted if self.prompts is None else self.prompts
        return Columns(*map(np.concatenate, zip(self.inserted, self.prompts, strict=True)))


def column(values: list[int]) -> npt.NDArray[np.int32]:
    """Return a column with these numbers, int32[n]."""
    return np.array(values, dtype=np.int32)
