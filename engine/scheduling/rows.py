"""Sequences, the token side of requests, and the row table: the numbers of every running sequence as columns.

Owns: the part of a sequence that survives a retraction, the limits that it must fit, the host's copy of each row.
Does not know: the queue, budgets, text, the device.
A step costs numpy calls on columns and not a loop over sequences.  Each count of a row's tokens has its writers, next
to ``take``, which sets them all:
  num_known      values on the host                          the completion of a step
  num_planned    known ones, and those being sampled         Decodes and Prefills, as they plan
  num_computed   with K/V, also of steps in flight           Decodes and Prefills, as they plan
  num_confirmed  of a prefill: with K/V of completed steps   the completion of a step
num_computed <= num_planned, and num_known lags num_planned by the steps in flight.  PageManager and Decodes write page
tables.  running: from a row's first step to its end; a row that has ended is kept until the last step that used it
has completed.  num_shared: pages that it found in the cache when it started.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kv.pages import Pages
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import UNKNOWN_ORIGIN, Origin

TokenIds = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int32]
NO_TOKEN = -1
WORTH_WAITING_TOKENS = 32  # tokens that a prefix that is not cached yet must save to be worth waiting for


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens, limits and history.  A policy sees the part that is ``policy.Waiting``.

    arrival: position in the order of admission; decides among equals.
    tokens: prompt and output known when the sequence was last queued (the row table has newer ones).
    num_prompt: number of them that are the prompt.  max_total: prompt plus most output tokens.
    stop_ids: token ids that end it.  row: its line in the row table, -1 while it waits.
    cache_salt, weights: only sequences with equal values share pages.  weights: name of the weights that compute keys
    and values in addition to the model, or behind a colon in its place; '' for none.  notes: data of features by name.
    num_cached_at_start: prompt tokens that needed no computing when it first ran, -1 until then.
    num_created: pages that its prefills have added to the cache.
    arrived_at, started_at, first_token_at: times of the scheduler's clock; None until then.
    """

    request_id: int
    arrival: int
    priority: int
    params: SamplingParams
    tokens: TokenIds
    num_prompt: int
    max_total: int
    stop_ids: tuple[int, ...]
    arrived_at: float
    row: int = -1
    cache_salt: str = ""
    num_cached_at_start: int = -1
    num_created: int = 0
    num_retractions: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached_now: int = 0
    num_overtaken: int = 0
    origin: Origin = UNKNOWN_ORIGIN
    weights: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        """The tenant whose share of the engine it uses."""
        return self.origin.tenant or self.origin.client

    @property
    def max_tokens(self) -> int:
        """The most tokens that its output may get, by its own limit or by the room there is."""
        return self.max_total - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute or to find in the cache before it can sample."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """The limits of a planner.

    max_running: number of rows.
    max_step_tokens: tokens of a step, decodes and prefill chunks together.
    prefill_chunk: the most tokens of one prompt in a step, and a prompt's share in its turn.
    max_len: tokens of prompt and output.
    eos_token_ids: token ids that end an output of the model.
    num_host_pages: pages in the host tier, 0 for none.
    itl_target_s: prefills are cut so that running requests get a token this often; 0 for no such target.
    record_events: collect the events of cached pages; the caller must drain them then.
    num_ranks: number of executors, each of which has a part of every page.
    scored_chunk: the most tokens of a prompt in a step if log probabilities of all of them are requested; these take
    memory of vocabulary size each.
    state_bytes: memory of a row's recurrent states; 0 for a model without them.
    lookahead: 1 if pages are shared only where the token after them is the same too, as in ``RadixTree``."""

    max_running: int
    max_step_tokens: int
    prefill_chunk: int
    page_size: int
    num_pages: int
    max_len: int
    eos_token_ids: tuple[int, ...]
    num_host_pages: int = 0
    itl_target_s: float = 0.0
    record_events: bool = False
    scored_chunk: int = 64
    num_ranks: int = 1
    state_bytes: int = 0
    lookahead: int = 0

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output that fit the context and the pool."""
        # The last token is sampled but never computed, so it needs no slot.
        return min(self.max_len, self.num_pages * self.page_size + 1)

    def max_total(self, num_prompt: int, max_tokens: int | None) -> int:
        """Return prompt plus most output tokens.  Raises RequestError if they can never fit."""
        longest = self.longest
        total = longest if max_tokens is None else num_prompt + max_tokens
        if num_prompt < 1:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if num_prompt >= longest or total > longest:
            what = f"{num_prompt} prompt tokens" + (f" plus max_tokens={max_tokens}" if max_tokens else "")
            bound = (
                f"the model's context of {self.max_len} tokens"
                if longest == self.max_len
                else f"the KV pool of {self.num_pages} pages x {self.page_size} tokens (raise kv.num_pages)"
            )
            raise RequestError(
                f"{what} exceed {bound}; shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
                param="prompt" if num_prompt >= longest else "max_tokens",
            )
        return total


class RowTable:
    """A table of ``max_running`` rows of at most ``max_len`` tokens."""

    def __init__(self, max_running: int, max_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * max_running
        self.request_ids = np.zeros(max_running, dtype=np.int64)
        self.tokens = np.zeros((max_running, max_len), dtype=np.int32)
        self.running = np.zeros(max_running, dtype=np.bool_)
        self.num_prompt = np.zeros(max_running, dtype=np.int32)
        self.num_shared = np.zeros(max_running, dtype=np.int32)
        self.num_known = np.zeros(max_running, dtype=np.int32)
        self.num_planned = np.zeros(max_running, dtype=np.int32)
        self.num_computed = np.zeros(max_running, dtype=np.int32)
        self.num_confirmed = np.zeros(max_running, dtype=np.int32)
        self.max_total = np.zeros(max_running, dtype=np.int32)
        self.num_pages = np.zeros(max_running, dtype=np.int32)
        self.page_table = np.zeros((max_running, -(-max_len // page_size)), dtype=np.int32)
        self.last_step = np.zeros(max_running, dtype=np.int64)
        self.stop_ids = np.full((4, max_running), NO_TOKEN, dtype=np.int32)
        self._free = list(range(max_running - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of rows that no sequence holds."""
        return len(self._free)

    def take(self, sequence: Sequence, pages: Pages, num_shared: int) -> int:
        """Give a sequence a row and its first pages, ``num_shared`` of which hold K/V already.  Return the row."""
        row = self._free.pop()
        count = len(sequence.tokens)
        self.sequences[row] = sequence
        self.request_ids[row] = sequence.request_id
        self.tokens[row, :count] = sequence.tokens
        self.running[row] = True
        self.num_prompt[row] = sequence.num_prompt
        self.num_shared[row] = num_shared
        self.num_known[row] = self.num_planned[row] = count
        self.num_computed[row] = self.num_confirmed[row] = num_shared * self.page_size
        self.max_total[row] = sequence.max_total
        self.num_pages[row] = len(pages)
        self.page_table[row, : len(pages)] = pages
        self.last_step[row] = -1
        self._set_stop_ids(row, sequence.stop_ids)
        sequence.row = row
        return row

    def release(self, row: int) -> Pages:
        """Take a row back.  Return the pages that it held."""
        pages = self.page_table[row, : self.num_pages[row]].copy()
        self.sequences[row] = None
        self.num_pages[row] = 0
        self._free.append(row)
        return pages

    def clear(self) -> None:
        """Make every row free."""
        self.sequences = [None] * len(self.sequences)
        self.running[:] = False
        self.num_pages[:] = 0
        self._free = list(range(len(self.sequences) - 1, -1, -1))

    def params_of(self, row: int) -> SamplingParams:
        """Return the parameters of the sequence that has the row."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence.params

    def append_pages(self, rows: Rows, pages: Pages) -> Rows:
        """Append one page to each of ``rows``.  Return the index of the new page in each row's page table."""
        indexes = self.num_pages[rows]
        self.page_table[rows, indexes] = pages
        self.num_pages[rows] = indexes + 1
        return indexes

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[0]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, missing), (0, 0)), constant_values=NO_TOKEN)
        self.stop_ids[:, row] = NO_TOKEN
        self.stop_ids[: len(stop_ids), row] = stop_ids
