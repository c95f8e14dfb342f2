"""A device whose K/V shows whether it was read from the right place, and the actor that runs steps on it.

Owns: the pool, page tables and tokens as an executor holds them; the time that steps take.
Does not know: why a page is where it is.  Pages are poisoned the moment the scheduler frees them, also while steps
that were planned before are still to run: a step that needs them then is wrong.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import structs

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import ExecutorInbox, FromExecutor
from engine.features.host_tier.messages import transfers_of
from engine.features.kv_store.messages import FetchPages, PagesFetched, moves_of
from engine.features.kv_store.records import DIGEST_BYTES, PageRecords
from engine.features.late_masks.planner import LateMasks
from engine.features.lora.files import NAME as LORA
from engine.features.lora.files import Placement
from engine.features.lora.messages import AdapterRead, ReadAdapter
from engine.features.speculation.messages import DRAFTED, drafted_part, proposals_of
from engine.features.speculation.messages import NAME as SPECULATION
from engine.kv.node import chained
from engine.kv.pages import Pages
from engine.messages import FeatureRequest, Step, StepDone, StepExtras
from engine.types.logprobs import Logprobs
from engine.types.notices import ExecutorsLost, ExecutorsReady
from server.extensions.chaos.sim.failures import SimIncorrect
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import ADAPTER_SALT, U64, VOCAB, WEIGHT, hashes, next_tokens
from server.extensions.chaos.sim.states import SimStates
from server.extensions.chaos.sim.store import SimStore

POISON = np.uint64(0xDEADBEEFDEADBEEF)
SLOW_GRAMMARS = 0x51DE  # a key of luck
GARBAGE = np.uint64(0x0BADF00D0BADF00D)  # what a step leaves behind whose logits were not finite


def ints(column: bytes) -> np.ndarray:
    """A message's column, wide enough to index with."""
    return np.frombuffer(column, dtype=np.int32).astype(np.int64)


def logprob_of(token: int, position: int) -> float:
    """Return the log probability of a token; exact in float32."""
    return -float(token * 16 + position % 16)


class SimDevice:
    """Steps on ``num_pages`` pages.  nan_tokens: operation -> which of its output tokens comes out as NaN.
    breaks: operation -> which of its output tokens ends the device.
    draft: what its draft model says behind some tokens, so many or none.

    Rows know which operation they serve by their seed.  mark: notes that something scarce has happened."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_slots: int,
        max_len: int,
        page_size: int,
        num_pages: int,
        num_host_pages: int,
        store: SimStore,
        nan_tokens: dict[int, int],
        breaks: dict[int, int],
        draft: Callable[[list[int], int], list[int]],
        mark: Callable[[str], None],
        num_snapshots: int = 0,
        num_on_host: int = 0,
    ) -> None:
        self.states = SimStates(num_rows, num_snapshots, num_on_host, mark)
        # The last page is where page tables point that have nothing to point at.
        self._kv: U64 = np.full((num_pages + 1, page_size), POISON, dtype=np.uint64)
        self._slots = self._kv.reshape(-1)
        self._host: U64 = np.full((num_host_pages, page_size), POISON, dtype=np.uint64)
        self._records = PageRecords(store, b"sim", 8 * page_size)
        self._state_records = PageRecords(store, b"states", 8)
        self._fetched: dict[int, list[U64]] = {}
        self._fetched_states: dict[int, dict[int, U64]] = {}
        self._to_save: Counter[int] = Counter()
        self._landing: list[int] = []
        self._page_size = page_size
        self._nowhere = num_pages
        self._tables = np.full((num_rows, -(-max_len // page_size)), num_pages, dtype=np.int64)
        self._tokens = np.zeros((num_rows, max_len + 1), dtype=np.int64)
        self._salts: U64 = np.zeros(num_slots + 1, dtype=np.uint64)  # by slot; the first is for no adapter
        self._row_slots = np.zeros(num_rows, dtype=np.int64)
        self._known = np.zeros(num_rows, dtype=np.int64)
        self._computed = np.zeros(num_rows, dtype=np.int64)
        self._offsets = np.arange(self._tables.shape[1] * page_size)
        self._nan_tokens = nan_tokens
        self._breaks = breaks
        self._draft = draft
        self._break_positions: dict[int, int] = {}
        self._nan_positions: dict[int, int] = {}
        self._logprob_rows: set[int] = set()
        self._slow_rows: dict[int, int] = {}  # those whose masks may be late -> the seed of their request
        # Rows that had proposals in their last step: a device does not know how many of them were right.
        self._overrun: set[int] = set()
        self._mark = mark

    def forget(self) -> None:
        """A new device: nothing of what was on the old one."""
        self._kv[:] = POISON
        self._host[:] = POISON
        self._fetched.clear()
        self._fetched_states.clear()
        self._to_save.clear()
        self._tables[:] = self._nowhere
        self._salts[1:] = POISON
        self._row_slots[:] = 0
        self._known[:] = 0
        self._computed[:] = 0
        self._nan_positions.clear()
        self._break_positions.clear()
        self._logprob_rows.clear()
        self._slow_rows.clear()
        self._overrun.clear()
        self.states.forget()

    def poison(self, pages: Pages) -> None:
        """The scheduler has freed these; those that a step before still saves keep what they have."""
        self._kv[[page for page in pages.tolist() if not self._to_save[page]]] = POISON

    def will_save(self, pages: Pages) -> None:
        """A step that has been planned saves these."""
        self._to_save.update(pages.tolist())

    def fetch(self, message: FetchPages, most: int) -> tuple[int, tuple[int, ...]]:
        """Read pages as far as they follow each other, ``most`` at the most; returns how many there are, and behind
        how many there are states."""
        pages = self._fetched[message.fetch_id] = []
        states = self._fetched_states[message.fetch_id] = {}
        for page_hash in chained(message.parent, message.tokens, 4 * self._page_size):
            record = bytearray(self._records.record_bytes)
            try:
                if len(pages) >= most or not self._records.load(page_hash, memoryview(record)):
                    break
            except OSError:
                self._mark("the store failed")
                break
            pages.append(np.frombuffer(record, dtype=np.uint64, offset=DIGEST_BYTES))
            state = bytearray(self._state_records.record_bytes)
            try:
                if self.states.is_on and self._state_records.load(page_hash, memoryview(state)):
                    states[len(pages)] = np.frombuffer(state, dtype=np.uint64, offset=DIGEST_BYTES)
            except OSError:
                self._mark("the store failed")
        return len(pages), tuple(states)

    def run(self, step: Step) -> StepDone:
        """The whole step."""
        self._landing.clear()
        self._save(step)
        self._transfer(step)
        self._land(step)
        for admission in step.admissions:
            row, tokens, pages = admission.row, ints(admission.token_ids), ints(admission.pages)
            self._tokens[row, : len(tokens)] = tokens
            self._tables[row] = self._nowhere
            self._tables[row, : len(pages)] = pages
            self._known[row] = len(tokens)
            self._row_slots[row] = 0
            self._computed[row] = admission.num_computed_tokens
            self._nan_positions.pop(row, None)
            self._break_positions.pop(row, None)
            break_token = self._breaks.get(admission.params.seed or 0)
            if break_token is not None:
                self._break_positions[row] = admission.num_prompt_tokens + break_token
            nan_token = self._nan_tokens.get(admission.params.seed or 0)
            if nan_token is not None and admission.num_prompt_tokens + nan_token >= len(tokens):
                self._nan_positions[row] = admission.num_prompt_tokens + nan_token
            self._logprob_rows.discard(row)
            self._overrun.discard(row)
            self._slow_rows.pop(row, None)
            seed = admission.params.seed or 0
            if luck(SLOW_GRAMMARS, seed) < 0.2:
                self._slow_rows[row] = seed
            if admission.params.logprobs is not None:
                self._logprob_rows.add(row)
        for row in self.states.begin(step):
            (at,) = np.flatnonzero(ints(step.prefill_rows) == row)
            self._computed[row] = ints(step.prefill_starts)[at]
            self._mark("state before a wrong token")
        self._place(step)
        if step.table_rows:
            self._tables[ints(step.table_rows), ints(step.table_indexes)] = ints(step.table_pages)
        return self._forward(step)

    def _place(self, step: Step) -> None:
        if (part := step.parts.get(LORA)) is None:
            return
        for one in msgspec.msgpack.decode(part, type=list[Placement]):
            self._row_slots[one.row] = one.slot
            if one.adapter is not None:
                if self._salts[one.slot] not in (0, POISON):
                    self._mark("adapter replaced")
                self._salts[one.slot] = ADAPTER_SALT[one.adapter.digest]

    def _save(self, step: Step) -> None:
        moves = moves_of(step)
        pages = ints(moves.save_pages).tolist()
        for number, page in enumerate(pages):
            self._to_save[page] -= 1
            if (self._kv[page] == POISON).any():
                raise SimIncorrect(f"step {step.step_id} saves page {page}: never filled, or freed")
            record = bytearray(DIGEST_BYTES) + self._kv[page].tobytes()
            self._put(self._records, moves.save_hashes[32 * number : 32 * number + 32], record)
        for number, slot in enumerate(ints(moves.save_slots).tolist()):
            record = bytearray(DIGEST_BYTES) + self.states.saved(step.step_id, slot)
            self._put(self._state_records, moves.state_hashes[32 * number : 32 * number + 32], record)

    def _put(self, records: PageRecords, page_hash: bytes, record: bytearray) -> None:
        try:
            records.save(page_hash, memoryview(record))
        except OSError:
            self._mark("the store failed")

    def _land(self, step: Step) -> None:
        for landing in moves_of(step).landings:
            fetched = self._fetched.pop(landing.fetch_id, [])
            states = self._fetched_states.pop(landing.fetch_id, {})
            pages = ints(landing.pages).tolist()
            if len(pages) > len(fetched) - landing.first:
                raise SimIncorrect(f"step {step.step_id}: {landing}, but {len(fetched)} pages were fetched")
            for page, values in zip(pages, fetched[landing.first :], strict=False):
                self._kv[page] = values
                self._mark("pages from the store")
            if landing.state:
                if landing.state not in states:
                    raise SimIncorrect(f"step {step.step_id}: {landing}, but states were fetched behind {[*states]}")
                self.states.arrived[landing.fetch_id] = states[landing.state]
                self._mark("state from the store")

    def _transfer(self, step: Step) -> None:
        moves = transfers_of(step)
        columns = ints(moves.to_host), ints(moves.device_pages), ints(moves.host_pages)
        for to_host, on_device, on_host in zip(*(column.tolist() for column in columns), strict=True):
            source = self._kv[on_device] if to_host else self._host[on_host]
            if (source == POISON).any():
                way = "to" if to_host else "from"
                raise SimIncorrect(
                    f"step {step.step_id} copies page {on_device} {way} host page {on_host}: never filled, or freed"
                )
            if to_host:
                self._host[on_host] = source
                self._kv[on_device] = POISON  # it was freed when this was planned
                self._mark("pages to host")
            else:
                self._kv[on_device] = source
                self._landing.append(on_device)
                self._mark("pages back from host")

    def _counted(self, step: Step, counted: list[int]) -> Step:
        """The step with the positions that rows really have, of those whose lengths the device counts."""
        proposals = proposals_of(step)
        named, positions, _ = proposals.columns()
        rows, starts, positions = ints(step.prefill_rows), ints(step.prefill_starts).copy(), positions.copy()
        for at in np.flatnonzero(np.isin(rows, counted)).tolist():
            row, more = rows[at], starts[at] - self._computed[rows[at]]
            if more < 0:
                raise SimIncorrect(f"step {step.step_id}: row {row} is planned for {-more} tokens less than it has")
            starts[at] -= more
            positions[named == row] -= more
            self._mark("tokens counted by the device")
        moved = structs.replace(proposals, positions=positions.astype(np.int32).tobytes())
        return structs.replace(step, prefill_starts=starts.astype(np.int32).tobytes(), parts=step.parts | moved.part())

    def _forward(self, step: Step) -> StepDone:
        if counted := ints(proposals_of(step).counted).tolist():
            step = self._counted(step, counted)
        rows = ints(step.decode_rows)
        starts: np.ndarray = self._computed[rows]
        lengths: np.ndarray = np.ones(len(rows), dtype=np.int64)
        samples = lengths
        proposed = self._propose(step) if SPECULATION in step.parts else {}
        if untold := self._overrun.intersection(rows.tolist()).difference(counted):
            raise SimIncorrect(f"step {step.step_id}: rows {sorted(untold)} decode, and no segment gives their start")
        if step.prefill_rows:
            rows = np.concatenate((rows, ints(step.prefill_rows)))
            starts = np.concatenate((starts, ints(step.prefill_starts)))
            lengths = np.concatenate((lengths, ints(step.prefill_lengths)))
            samples = np.concatenate((samples, ints(step.prefill_samples)))
            self._overrun.difference_update(set(rows.tolist()).difference(counted))
        ends = starts + lengths
        known = self._known[rows]
        for row, wanted in proposed.items():
            known[rows == row] += len(wanted)
        if (starts != self._computed[rows]).any() or (ends > known).any():
            raise SimIncorrect(
                f"step {step.step_id}: rows {rows.tolist()} go from {starts.tolist()} to {ends.tolist()}, "
                f"but have {self._computed[rows].tolist()} computed of {self._known[rows].tolist()}"
            )
        written = self._compute(step, rows, starts, lengths)
        self._computed[rows] = ends
        sampled = np.repeat(rows, samples)
        # How many tokens come before each one that is sampled: the last positions of each sequence.
        positions = np.repeat(ends - samples, samples) + 1
        positions += np.arange(len(sampled)) - np.repeat(np.cumsum(samples) - samples, samples)
        tokens: np.ndarray = self._sample(step, sampled, positions)
        counts = self._verify(proposed, sampled, tokens)
        for row, position in zip(sampled[counts].tolist(), positions[counts].tolist(), strict=True):
            if self._break_positions.get(row) == position:
                raise DeviceBroken
        extras = self._extras(sampled, tokens, positions)
        for row in [row for row in self._nan_positions if row in sampled]:
            at = np.flatnonzero((sampled == row) & counts & (positions == self._nan_positions[row]))
            if len(at):
                del self._nan_positions[row]
                tokens[at[0]] = -1
                self._slots[written[np.repeat(rows, lengths) == row]] = GARBAGE
                self._mark("NaN")
        self.states.advance(rows, self._slots[written[np.cumsum(lengths) - 1]])
        self.states.end(step)
        self._tokens[sampled, positions] = np.maximum(tokens, 0)
        self._known[sampled[counts]] = positions[counts] + 1
        self._computed[sampled[counts]] = positions[counts]
        parts = self._drafted(step, proposed)
        late = tuple(row for row, seed in self._slow_rows.items() if luck(SLOW_GRAMMARS, seed, step.step_id) < 0.5)
        if late:
            self._mark("masks late")
        if self._slow_rows:
            parts[LateMasks.part] = msgspec.msgpack.encode(late)
        tokens = tokens.astype(np.int32)
        return StepDone(rank=0, step_id=step.step_id, token_ids=tokens.tobytes(), extras=extras, parts=parts)

    def _extras(self, sampled: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> dict[int, StepExtras]:
        """Return the log probabilities of the rows that have them."""
        logprobs: dict[int, tuple[Logprobs, ...]] = {}
        for index in np.flatnonzero(np.isin(sampled, list(self._logprob_rows))).tolist() if self._logprob_rows else ():
            token = int(tokens[index])
            value = logprob_of(token, int(positions[index]))
            row, ids, values = int(sampled[index]), np.array([token], np.int32), np.array([value], np.float32)
            found = Logprobs(logprob=value, top_ids=ids.tobytes(), top_logprobs=values.tobytes())
            logprobs[row] = (*logprobs.get(row, ()), found)
        return {
            row: StepExtras(logprobs=first, later_logprobs=tuple(later)) for row, (first, *later) in logprobs.items()
        }

    def _drafted(self, step: Step, proposed: dict[int, list[int]]) -> dict[str, bytes]:
        """The part of the result with the tokens that the draft model has named."""
        if DRAFTED not in ints(proposals_of(step).tokens):
            return {}
        # A row that has ``DRAFTED`` still was not ready.
        by_row = {row: np.array(one, np.int32).tobytes() for row, one in proposed.items() if DRAFTED not in one}
        for _ in by_row:
            self._mark("tokens drafted")
        return {SPECULATION: drafted_part(by_row, most_places=len(self._known) * 4)}

    def _propose(self, step: Step) -> dict[int, list[int]]:
        """Write proposed tokens behind the known ones; returns them by row."""
        proposed: dict[int, list[int]] = {}
        rows, positions, tokens = proposals_of(step).columns()
        for row in np.unique(rows[tokens == DRAFTED]).tolist():
            count = int((rows == row).sum())
            tokens = tokens.copy()
            tokens[rows == row] = self._draft(self._tokens[row, : self._known[row]].tolist(), count) or DRAFTED
        for row, position, token in zip(rows.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            if position != self._known[row] + len(proposed.setdefault(row, [])) or not DRAFTED <= token < VOCAB:
                raise SimIncorrect(f"step {step.step_id} proposes {token} at {position} of row {row}")
            proposed[row].append(token)
            self._tokens[row, position] = max(token, 0)
        return proposed

    def _verify(self, proposed: dict[int, list[int]], sampled: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which of the tokens decoding would have sampled as well."""
        counts = np.ones(len(sampled), dtype=np.bool_)
        for row, wanted in proposed.items():
            at = np.flatnonzero(sampled == row)
            wrong = np.flatnonzero(tokens[at[:-1]] != wanted)
            counts[at[wrong[0] + 1 :] if len(wrong) else at[:0]] = False
            self._overrun.add(row)
            self._mark("proposals rejected" if len(wrong) else "proposals accepted")
        return counts

    def _compute(self, step: Step, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Write the K/V of the step's tokens; returns their slots."""
        size = self._page_size
        before = np.maximum(starts - 1, 0)
        previous = self._slots[self._tables[rows, before // size] * size + before % size]
        previous[starts == 0] = 0
        if (previous == POISON).any():
            row = rows[previous == POISON][0]
            raise SimIncorrect(f"step {step.step_id}: row {row} continues a page that was freed or never filled")
        self.states.check(step, rows, starts, previous)
        if lengths.max() > 1:
            first = np.cumsum(lengths) - lengths
            rows_T = np.repeat(rows, lengths)
            positions = np.arange(len(rows_T)) + np.repeat(starts - first, lengths)
            added = hashes(self._tokens[rows_T, positions], positions) + self._salts[self._row_slots[rows_T]]
            sums = np.cumsum(added)
            values = sums + np.repeat(previous - sums[first] + added[first], lengths)
        else:
            rows_T, positions = rows, starts
            values = previous + hashes(self._tokens[rows, starts], starts) + self._salts[self._row_slots[rows]]
        pages = self._tables[rows_T, positions // size]
        slots: np.ndarray = pages * size + positions % size
        if self._landing and np.isin(pages, self._landing).any():
            # The first layers' part of it may have been written before the last layers' has come back.
            raise SimIncorrect(f"step {step.step_id} writes to a page that comes back from the host with it")
        if (pages == self._nowhere).any():
            raise SimIncorrect(f"step {step.step_id}: row {rows_T[pages == self._nowhere][0]} writes without a page")
        self._slots[slots] = values
        if (self._slots[slots] != values).any():
            raise SimIncorrect(f"step {step.step_id}: two of its tokens share a slot")
        return slots

    def _sample(self, step: Step, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The token behind so many of each row, from all their slots as its page table has them."""
        if not len(rows):
            return np.zeros(0, dtype=np.int64)
        num_pages = -(-int(lengths.max()) // self._page_size)
        values = self._kv[self._tables[rows, :num_pages]].reshape(len(rows), -1)
        width = values.shape[1]
        inside = self._offsets[:width] < lengths[:, None]
        if ((values == POISON) & inside).any():
            row = rows[((values == POISON) & inside).any(axis=1)][0]
            raise SimIncorrect(f"step {step.step_id}: row {row} reads a page that was freed or never filled")
        values *= inside
        following: np.ndarray = next_tokens(np.add.reduce(values * WEIGHT[:width], axis=1))
        return following


class DeviceBroken(Exception):
    """A scenario wanted this step to be the device's last."""


class SimExecutor(Actor[ExecutorInbox]):
    """Runs steps in order, each for a while; at most ``overlap`` are queued.

    step_s, row_s, read_s: mean duration of a step, what each row that decodes adds to it, and the duration of reading
    a page from the store.  A step's effects are made when it begins or when it ends, by luck: a device makes them
    somewhere between."""

    def __init__(
        self,
        *,
        capacity: int,
        device: SimDevice,
        num_pages: int,
        overlap: int,
        step_s: float,
        row_s: float,
        load_s: float,
        read_s: float,
        seed: int,
    ) -> None:
        super().__init__("executor0", capacity)
        self._device = device
        self._num_pages = num_pages
        self._overlap = overlap
        self._step_s = step_s
        self._row_s = row_s
        self._load_s = load_s
        self._read_s = read_s
        self._seed = seed
        self._steps: deque[Step] = deque()
        self._result: StepDone | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hangs_until = 0.0
        self._is_up = False
        self._num_lives = 0
        self._scheduler: Link[ExecutorsReady | FromExecutor | ExecutorsLost] | None = None
        self.broke: Callable[[], None] = lambda: None  # called when a step has ended the device

    def connect(self, scheduler: Link[ExecutorsReady | FromExecutor | ExecutorsLost]) -> None:
        """Set the receiver of results."""
        self._scheduler = scheduler

    async def run(self) -> None:
        """Load, then serve."""
        self._timer = asyncio.get_running_loop().call_later(self._load_s, self.come_back)
        await super().run()

    def handle(self, message: ExecutorInbox) -> None:
        if isinstance(message, FeatureRequest):
            self._read(message) if message.feature == LORA else self._fetch(FetchPages.of(message))
            return
        if not isinstance(message, Step):
            raise SimulatedCrash(f"{self.name} crashes by a fault of the plan")
        if not self._is_up:
            return  # sent before the scheduler was notified of the loss
        self._steps.append(message)
        if len(self._steps) > self._overlap:
            raise SimIncorrect(f"{len(self._steps)} steps in flight, at most {self._overlap} were agreed")
        if len(self._steps) == 1:
            self._begin()

    def _read(self, message: FeatureRequest) -> None:
        """Answer when an adapter is read, which takes as long as a page of the store."""
        if not self._is_up or ReadAdapter.of(message).drop:
            return
        life, read_s = self._num_lives, self._read_s * 2 * luck(self._seed, 0xA, message.number)

        def answer() -> None:
            if life == self._num_lives:
                assert self._scheduler is not None
                self._scheduler.put(AdapterRead().message(rank=0, number=message.number))

        asyncio.get_running_loop().call_later(read_s, answer)

    def _fetch(self, message: FetchPages) -> None:
        """Answer when all is read or time is over, whichever is first."""
        if not self._is_up:
            return
        page_s = self._read_s * 2 * luck(self._seed, 0xF, message.fetch_id)
        num_pages, states = self._device.fetch(message, most=int(message.timeout_s / page_s) if page_s else 1 << 30)
        life = self._num_lives

        def answer() -> None:
            if life == self._num_lives:
                assert self._scheduler is not None
                fetched = PagesFetched(rank=0, fetch_id=message.fetch_id, num_pages=num_pages, states=states)
                self._scheduler.put(fetched.message())

        asyncio.get_running_loop().call_later(min(message.timeout_s, page_s * (num_pages + 1)), answer)

    def hang(self, seconds: float) -> None:
        """The step under way, or the next one, takes that much longer."""
        self._hangs_until = asyncio.get_running_loop().time() + seconds

    def lose(self, *, is_fault: bool = True) -> bool:
        """The device is gone, and every step with it; False while there is none.  is_fault: see ``ExecutorsLost``."""
        if not self._is_up:
            return False
        self.close()
        self._is_up = False
        self._num_lives += 1
        self._hangs_until = 0.0
        self._steps.clear()
        self._result = None
        self._device.forget()
        assert self._scheduler is not None
        self._scheduler.put(ExecutorsLost(reason="the scenario says so", is_fault=is_fault))
        return True

    def come_back(self) -> None:
        """The model is loaded."""
        self._is_up = True
        assert self._scheduler is not None
        self._scheduler.put(ExecutorsReady(num_pages=self._num_pages))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        step = self._steps[0]
        draw = luck(self._seed, 0xE, step.step_id)
        if draw < 0.5:
            self._result = self._run(step)
            if self._result is None:
                return
        loop = asyncio.get_running_loop()
        rows_s = self._row_s * len(ints(step.decode_rows))
        self._timer = loop.call_later((self._step_s + rows_s) * (0.5 + draw), self._end)

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._hangs_until:
            self._timer = loop.call_at(self._hangs_until, self._end)
            return
        step = self._steps.popleft()
        result, self._result = self._result or self._run(step), None
        if result is None:
            return
        assert self._scheduler is not None
        self._scheduler.put(result)
        if self._steps:
            self._begin()

    def _run(self, step: Step) -> StepDone | None:
        try:
            return self._device.run(step)
        except DeviceBroken:
            self.lose()
            self.broke()
            return None


class SimulatedCrash(Exception):
    """A scenario asked for it."""
