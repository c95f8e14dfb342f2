"""The kits for observers, policies and grammars: each mutant is broken in one way, and must be named."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.events import KVEvent
from engine.plugins.hookspecs import GrammarContext, hookimpl
from engine.plugins.options import Options
from engine.plugins.proof.findings import ConformanceError, Findings
from engine.plugins.testing import promises
from engine.plugins.testing.grammar import check_grammar_engine
from engine.plugins.testing.logits_processor import check_logits_processor
from engine.plugins.testing.observer import check_observer
from engine.plugins.testing.policy import check_scheduling_policy
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.policy import Waiting
from engine.text.processors import LogitsRows
from engine.types.errors import RequestError
from engine.types.params import Grammar


def _said(request: pytest.FixtureRequest) -> str:
    """What a mutant is to be told; nothing where a test has none."""
    case = getattr(request.node, "callspec", None)
    return "" if case is None else str(case.params.get("said", ""))


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those that are slow, which are so by little; any other may look slow on a busy machine."""
    if " took " in _said(request):
        monkeypatch.setattr(promises, "SLOW_S", 0.05)


# ---- observers -----------------------------------------------------------------------------------


class Counts:
    """Right."""

    def __init__(self) -> None:
        self.num = 0

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self.num += len(requests)


class Raises:
    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        for one in requests:
            one.ttft_s * 1000  # of one that never got a token


class Mutates:
    @hookimpl
    def callboard_request_finished(self, requests: list[RequestMetrics]) -> None:
        requests.clear()


class Blocks(Counts):
    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        time.sleep(0.06)


class Knows:
    @hookimpl
    def callboard_kv_event(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            {"stored": 1, "removed": 2, "restored": 3}[event.kind]


class Keeps:
    def __init__(self) -> None:
        self.all: list[RequestMetrics] = []

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self.all += requests


class Deaf:
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None: ...


class Misspelt(Counts):
    @hookimpl
    def callboard_request_finshed(self, requests: Sequence[RequestMetrics]) -> None: ...


class Async(Counts):
    @hookimpl
    async def callboard_kv_event(self, events: Sequence[KVEvent]) -> None: ...


class NeedsARequest(Counts):
    @hookimpl
    def callboard_engine_stopped(self) -> None:
        assert self.num, "planted"


class LeavesAThread(Counts):
    over = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self.over.wait, args=(10,), name="left behind").start()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Raises, "requests: raised TypeError"),
        (Mutates, "requests: callboard_request_finished has changed its batch"),
        (Blocks, "requests: callboard_request_finished took [0-9]"),
        (Knows, "events: raised KeyError: 'of a later version'"),
        (Keeps, "memory: it leaks: a request and an event keeps"),
        (Deaf, "hooks: it observes nothing; it must implement"),
        (Misspelt, "hooks: raised PluginValidationError: .*callboard_request_finshed"),
        (Async, "hooks: callboard_kv_event is async"),
        (NeedsARequest, "an engine that stops at once: planted"),
        (LeavesAThread, "threads: after callboard_engine_stopped its threads continue: left behind"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_observer_is_named(make: type, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LeavesAThread.over.clear()
    monkeypatch.setattr("engine.plugins.testing.observer.END_S", 0.05)
    monkeypatch.setattr("engine.plugins.testing.observer.NUM_BATCHES", 12)
    try:
        with pytest.raises(ConformanceError, match=said):
            check_observer(make)
    finally:
        LeavesAThread.over.set()


def test_a_right_observer_passes() -> None:
    check_observer(Counts)


def test_an_observer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Findings.timed, "__defaults__", (0.2,))
    over = threading.Event()

    class Hangs(Counts):
        @hookimpl
        def callboard_engine_stopped(self) -> None:
            over.wait()

    began = time.monotonic()
    with pytest.raises(ConformanceError, match=r"requests: not done after 0\.2 s, at .*in callboard_engine_stopped"):
        check_observer(Hangs)
    assert time.monotonic() - began < 20
    over.set()


# ---- policies ------------------------------------------------------------------------------------


class Policy:
    looks_at_cache = False

    def __init__(self) -> None:
        self.seen: list[object] = []

    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        return (waiting.priority,)


class Dozes(Policy):
    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        if waiting.arrival % 5 == 4:
            time.sleep(0.06)
        return (waiting.priority,)


class Hoards(Policy):
    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        self.seen.append(waiting)
        return (waiting.priority,)


class ByOrderOfAsking(Policy):
    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        if waiting.arrival not in self.seen:
            self.seen.append(waiting.arrival)
        return (self.seen.index(waiting.arrival),)


class Tenants(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, float] = {}

    def turn(self, tenant: str) -> float:
        return self.counts.get(tenant, 0.0)

    def returned(self, tenant: str, lowest: float) -> None:
        self.counts = {name: count for name, count in self.counts.items() if count > lowest}

    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.counts[tenant] = self.turn(tenant) + num_prompt_tokens + num_output_tokens


class Unpaid(Tenants):
    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        super().served(tenant, num_prompt_tokens if tenant == "patient" else 0, 0)


class Refunds(Tenants):
    def served(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        super().served(tenant, num_prompt_tokens, -2 * num_output_tokens)


class NeverForgets(Tenants):
    def returned(self, tenant: str, lowest: float) -> None:
        self.counts[tenant] = max(self.turn(tenant), lowest)


def test_a_right_policy_of_tenants_passes() -> None:
    check_scheduling_policy(Tenants)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unpaid, "no tenant waits forever: a tenant still waits after"),
        (Refunds, "no tenant waits forever: the turn of 'greedy' falls"),
        (NeverForgets, "memory of tenants: it leaks"),
        (Dozes, "ranks: rank took [0-9]"),
        (Hoards, "memory: it leaks: a request that is ranked keeps"),
        (ByOrderOfAsking, "two policies rank alike, in any order: their ranks differ"),
    ],
)
def test_a_broken_policy_is_named(make: type, said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        check_scheduling_policy(make)


# ---- logits processors ---------------------------------------------------------------------------


class Params(Options, frozen=True):
    by: float = 1.0


class Loose(msgspec.Struct, frozen=True):
    by: float = 1.0


class Adds:
    """Right: the token before gets so much more."""

    params: type[msgspec.Struct] = Params

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        last_n1 = rows.token_ids_nL.long().gather(1, rows.lengths_n[:, None] - 1)
        by_n1 = torch.tensor([[one.by] for one in rows.params])
        return logits_nV.scatter_add_(1, last_n1, by_n1)


class OfLoose(Adds):
    params = Loose


class Counting(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        self.seen.append(1)
        return super().process(logits_nV, rows) + len(self.seen)


class ByTheBatch(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_nV, rows) + len(rows.params)


class LastOfTheTable(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        return logits_nV.scatter_add_(1, rows.token_ids_nL[:, -1:].long(), torch.ones(len(logits_nV), 1))


class Double(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        return super().process(logits_nV, rows).double()


class KeepsLogits(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        self.seen.append(logits_nV)
        return super().process(logits_nV, rows)


class Slow(Adds):
    def process(self, logits_nV: Tensor, rows: LogitsRows) -> Tensor:
        time.sleep(0.06)
        return super().process(logits_nV, rows)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (OfLoose, "parameters: a field that params does not have is not refused"),
        (Counting, "the same again: a row of 1 tokens .* gets other logits when it is processed again"),
        (ByTheBatch, "together and alone: a row of 1 tokens .* gets other logits when it is alone"),
        (LastOfTheTable, "after their ends: a row of .* gets other logits with other tokens after its end"),
        (Double, r"together and alone: process returned \(torch.Size.*float64"),
        (KeepsLogits, "memory: it leaks: a step that it processes keeps"),
        (Slow, "together and alone: process took [0-9]"),
    ],
)
def test_a_broken_logits_processor_is_named(make: type, said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        check_logits_processor(make, [{}, {"by": 2.0}])


def test_a_right_logits_processor_passes() -> None:
    check_logits_processor(Adds, [{}, {"by": 2.0}])


# ---- grammars ------------------------------------------------------------------------------------


class Choice:
    """A right engine for choices, whose parts mutants replace."""

    num_bytes = 100

    def __init__(self, context: GrammarContext) -> None:
        self.context = context
        self.kept: list[object] = []
        self.texts: tuple[bytes, ...] = ()

    def compile(self, grammar: Grammar) -> "Choice":
        texts = self.parse(grammar)
        compiled = type(self)(self.context)
        compiled.texts = tuple(text.encode() for text in texts)
        return compiled

    def parse(self, grammar: Grammar) -> list[str]:
        import msgspec

        try:
            texts = msgspec.json.decode(grammar.source, type=list[str])
        except msgspec.DecodeError:
            texts = []
        if grammar.kind != "choice" or not texts:
            raise RequestError("no grammars but choices", code="invalid_grammar")
        return texts

    def matcher(self) -> "ChoiceMatcher":
        return ChoiceMatcher(self)


class ChoiceMatcher:
    def __init__(self, compiled: Choice) -> None:
        self.context, self.left = compiled.context, list(compiled.texts)

    def consume(self, token_id: int) -> None:
        piece = self.context.pieces[token_id]
        self.left = [text[len(piece) :] for text in self.left if text.startswith(piece)]

    def ids(self) -> list[int]:
        pieces = enumerate(self.context.pieces)
        allowed = [index for index, piece in pieces if piece and any(text.startswith(piece) for text in self.left)]
        return allowed + list(self.context.eos_token_ids) * (b"" in self.left)

    def fill(self, mask: Any) -> None:
        mask[:] = 0
        for token_id in self.ids():
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def mutant(**methods: Callable[..., Any]) -> type[Choice]:
    """An engine whose matcher has other methods."""
    matcher = type("Mutant", (ChoiceMatcher,), methods)
    return type("MutantEngine", (Choice,), {"matcher": lambda self: matcher(self)})


def only_adds(self: ChoiceMatcher, mask: Any) -> None:
    for token_id in self.ids():
        mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def dozes(self: ChoiceMatcher, token_id: int) -> None:
    time.sleep(0.06)
    ChoiceMatcher.consume(self, token_id)


class Shared(Choice):
    """All matchers of a grammar are one."""

    def matcher(self) -> ChoiceMatcher:
        self.kept = self.kept or [ChoiceMatcher(self)]
        return self.kept[0]  # type: ignore[return-value]


class Crashes(Choice):
    def parse(self, grammar: Grammar) -> list[str]:
        if grammar.kind != "choice":
            raise RequestError("no", code="invalid_grammar")
        import json

        return list(json.loads(grammar.source))


class BlamesItself(Choice):
    def parse(self, grammar: Grammar) -> list[str]:
        try:
            return super().parse(grammar)
        except RequestError:
            raise RequestError("no", status=500) from None


class Leaks(Choice):
    everything: ClassVar[list[object]] = []

    def matcher(self) -> ChoiceMatcher:
        self.everything.append(bytearray(100))
        return super().matcher()


BYTES_ONLY = mutant(ids=lambda self: [one for one in ChoiceMatcher.ids(self) if one < 257])
NEVER_ENDS = mutant(ids=lambda self: [one for one in ChoiceMatcher.ids(self) if one != 256])
TOO_MUCH = mutant(ids=lambda self: [*ChoiceMatcher.ids(self), 256])
PADDING = mutant(ids=lambda self: [*ChoiceMatcher.ids(self), 300])
SPECIALS = mutant(ids=lambda self: [*ChoiceMatcher.ids(self), 257])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (BYTES_ONLY, r"choice: outputs: b'app' may not follow b'' of the output 'apple'"),
        (NEVER_ENDS, "choice: outputs: the output may not end after 'apple'"),
        (TOO_MUCH, "choice: outputs: '' may be an output"),
        (PADDING, r"choice: outputs: tokens without text may come next: \[300\]"),
        (SPECIALS, "choice: outputs: a special token that the grammar does not name may"),
        (mutant(fill=only_adds), "choice: outputs: fill leaves bits of the buffer unchanged"),
        (mutant(consume=dozes), "choice: outputs: consume took [0-9]"),
        (
            mutant(consume=lambda self, token_id: setattr(self, "left", [])),
            "choice: every way can continue: nothing may",
        ),
        (Shared, "choice: matchers: two matchers of one grammar affect each other"),
        (Crashes, "wrong: choice no JSON: raised JSONDecodeError"),
        (BlamesItself, "kinds: a grammar is refused with 500"),
        (Leaks, "memory: it leaks: a grammar that is compiled and followed keeps"),
    ],
)
def test_a_broken_grammar_engine_is_named(make: type, said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        check_grammar_engine(make)


def test_a_right_grammar_engine_passes_whatever_kinds_it_refuses() -> None:
    check_grammar_engine(Choice)
