"""The kit is only as good as what it catches: each of these is broken in one way, and must be named."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv.eviction import Candidate
from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.declaration import Declaration, Multiples
from engine.plugins.kv_store.kit import check_kv_store
from engine.plugins.proof import comm as comm_proof
from engine.plugins.proof.attention_cases import trial_cases
from engine.plugins.proof.findings import ConformanceError, Findings
from engine.plugins.proof.reference import attend
from engine.plugins.testing import attention as kit
from engine.plugins.testing import comm as comm_kit
from engine.plugins.testing import promises
from engine.plugins.testing.attention import check_attention_backend
from engine.plugins.testing.attention_cases import attention_cases
from engine.plugins.testing.comm import check_comm
from engine.plugins.testing.eviction import check_eviction_strategy
from engine.plugins.testing.policy import check_scheduling_policy
from engine.plugins.testing.threads import ThreadComm
from engine.scheduling.policy import Waiting
from tests.attention.reference import attend_one
from tests.benchmarks.planned_attention import GraphRows, PlannedTorchAttention
from tests.graphs.resident import ResidentTorchAttention

SMALL = Declaration(api=1, dtypes=("float32",), head_sizes=(64,), page_sizes=(16,), heads_per_kv_head=(2,))


@pytest.mark.parametrize("window", [0, 1, 5])
def test_the_reference_is_the_definition(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q_nNH, keys_LGH, values_LGH = (
        torch.randn(shape, generator=generator) for shape in ((4, 6, 8), (11, 2, 8), (11, 2, 8))
    )
    out_nNH = attend(q_nNH, keys_LGH, values_LGH, 0.3, window)
    for query in range(4):
        end = 11 - 4 + query + 1
        expected_NH = attend_one(q_nNH[query], keys_LGH[:end], values_LGH[:end], 0.3, window)
        assert torch.allclose(out_nNH[query], expected_NH, rtol=1e-12, atol=1e-12)


# ---- attention -----------------------------------------------------------------------------------


class Mutant(TorchAttention):
    """Right but for what a subclass overrides."""

    def __init__(self, spec: AttentionSpec, pool: KVPool) -> None:
        super().__init__(self.change_spec(spec), pool)

    def change_spec(self, spec: AttentionSpec) -> AttentionSpec:
        return spec


class UsualScale(Mutant):
    def change_spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, scale=spec.head_size**-0.5)


class NoWindow(Mutant):
    def change_spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=0)


class OneMore(Mutant):
    def change_spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=spec.window and spec.window + 1)


class WindowEverywhere(Mutant):
    def change_spec(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, first_window_layer=0)


class FirstLayerOnly(Mutant):
    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return super().attend(0, q_TNH)


class FirstStepOnly(Mutant):
    begun = False

    def plan_step(self, batch: AttentionBatch) -> None:
        if not self.begun:
            super().plan_step(batch)
        self.begun = True


class LengthOffByOne(Mutant):
    def plan_step(self, batch: AttentionBatch) -> None:
        lengths = np.maximum(batch.host_lengths - 1, batch.host_query_lengths)
        super().plan_step(replace(batch, host_lengths=lengths, lengths_B=torch.from_numpy(lengths)))


class WholePages(Mutant):
    """Reads the rest of a decode row's last page, and what stands there gets in as 0 times NaN."""

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        out_TNH = super().attend(layer, q_TNH)
        page = self.batch.page_table_BP[0, (int(self.batch.host_lengths[0]) - 1) // 16]
        rest = self.pool.values(layer)[int(page) * 16 : (int(page) + 1) * 16]
        out_TNH[0] += 0.0 * rest.sum()
        return out_TNH

    def plan_step(self, batch: AttentionBatch) -> None:
        self.batch = batch
        super().plan_step(batch)


class Writer(Mutant):
    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        out_TNH = super().attend(layer, q_TNH)
        self.pool.values(layer)[-self.pool.page_size - 1] = 0
        return out_TNH


class Float32(Mutant):
    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        return super().attend(layer, q_TNH).float()


class Raises(Mutant):
    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        raise RuntimeError("planted")


class Overflows(Mutant):
    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        out_TNH = super().attend(layer, q_TNH)
        return out_TNH * (torch.exp(q_TNH.square().sum((-1, -2), keepdim=True).sqrt()) / torch.inf + 1)


class PlansByTheHost(Mutant):
    """Says that a graph may hold it, and yet works with the lengths that the host knew."""

    capturable = True


class ForgetsTables(PlannedTorchAttention):
    """Builds backends for graphs that read page tables as they were at the capture."""

    def for_graph(self, batch: AttentionBatch) -> GraphRows:
        return GraphRows(*self._parts, replace(batch, page_table_BP=batch.page_table_BP.clone()))


class Begun:
    def plan_step(self, batch: AttentionBatch) -> None: ...


def failures(factory: Callable[[AttentionSpec, KVPool], object], declares: Declaration = SMALL) -> dict[str, str]:
    with pytest.raises(ConformanceError) as found:
        check_attention_backend(factory, declares)
    assert str(found.value).startswith(f"attention backend on cpu: {len(found.value.failures)} of ")
    return found.value.failures


@pytest.mark.parametrize("mutant", [UsualScale, FirstLayerOnly, LengthOffByOne, Writer, Raises])
def test_what_is_wrong_everywhere_fails_every_case(mutant: type[Mutant]) -> None:
    assert len(failures(mutant)) >= len(attention_cases(SMALL)) - 2  # a whole prompt cannot be too short


@pytest.mark.parametrize(
    ("mutant", "cases", "said"),
    [
        (NoWindow, "window", "is off by"),
        (OneMore, "window", "is off by"),
        (WindowEverywhere, "from layer 1", "layer 0"),
        (FirstStepOnly, "several steps", "step 1: "),
        (Overflows, "large scores", "NaN or infinity"),
    ],
)
def test_what_is_wrong_in_some_cases_fails_those(mutant: type[Mutant], cases: str, said: str) -> None:
    failed = failures(mutant)
    assert all(cases in case and said in reason for case, reason in failed.items()), failed


@pytest.mark.parametrize("mutant", [PlansByTheHost, ForgetsTables])
def test_a_backend_that_cannot_be_captured_as_it_says_fails_the_decode_steps(mutant: type[TorchAttention]) -> None:
    failed = failures(mutant)
    assert "decode, float32, 4/2 heads of 64, page 16" in failed
    assert all("as a graph calls it: layer 0" in reason for reason in failed.values()), failed


@pytest.mark.parametrize("backend", [ResidentTorchAttention, PlannedTorchAttention])
def test_a_backend_that_can_be_captured_passes(backend: Callable[[AttentionSpec, KVPool], AttentionBackend]) -> None:
    check_attention_backend(backend, SMALL)


def test_reading_what_lies_behind_the_last_token_is_found() -> None:
    assert any("NaN or infinity, perhaps from a slot" in reason for reason in failures(WholePages).values())


def test_failures_say_what_and_where() -> None:
    assert "the backend wrote to the KV pool" in failures(Writer).values()
    assert set(failures(Raises).values()) == {"raised RuntimeError: planted", "step 0: raised RuntimeError: planted"}
    wrong = failures(UsualScale)["decode, float32, 4/2 heads of 64, page 16"]
    assert "layer 0, sequence" in wrong
    assert "times the limit" in wrong
    halves = failures(Float32, replace_declaration(dtypes=("float16",)))
    assert all("attend returned" in reason and "torch.float32" in reason for reason in halves.values())
    assert set(failures(lambda spec, pool: Begun()).values()) == {"the backend has no method 'attend'"}


def replace_declaration(**changes: object) -> Declaration:
    import msgspec

    return msgspec.structs.replace(SMALL, **changes)


def test_cases_follow_the_declaration() -> None:
    def seen(**changes: object) -> list:
        return attention_cases(replace_declaration(**changes))

    assert {case.dtype for case in seen(dtypes=("bfloat16", "float16"))} == {"bfloat16", "float16"}
    assert {case.head_size for case in seen(head_sizes=Multiples(32, 130))} == {64, 96, 128}
    assert {case.head_size for case in seen(head_sizes=(24,))} == {24}
    assert {case.page_size for case in seen(page_sizes=())} == {1, 16, 64, 256}
    assert {case.ratio for case in seen(heads_per_kv_head=())} == {1, 2, 4, 5, 8}
    assert not any(case.window for case in seen(window=False))
    assert any(case.num_padding for case in seen(padding=True)) > any(case.num_padding for case in seen())
    assert not any(segments for case in seen(phases=("decode",)) for _, segments in case.steps)
    assert not any(rows for case in seen(phases=("prefill",)) for rows, _ in case.steps)
    assert all(case.steps for case in seen(phases=("prefill",)))
    assert len(trial_cases("float32", 16, 64, 0, ("decode",))) == 2


def test_padding_must_disturb_nobody() -> None:
    class Padded(Mutant):
        """Leaves padding out, and gives NaN or zeros for it."""

        filler = 0.0

        def plan_step(self, batch: AttentionBatch) -> None:
            self.real = int((batch.host_lengths > 0).sum())
            self.total = len(batch.host_lengths)
            super().plan_step(
                replace(
                    batch,
                    num_decodes=min(batch.num_decodes, self.real),
                    page_table_BP=batch.page_table_BP[: self.real],
                    lengths_B=batch.lengths_B[: self.real],
                    query_starts_B1=batch.query_starts_B1[: self.real + 1],
                    host_lengths=batch.host_lengths[: self.real],
                    host_query_lengths=batch.host_query_lengths[: self.real],
                )
            )

        def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
            padding = self.total - self.real
            out_TNH = super().attend(layer, q_TNH[: len(q_TNH) - padding])
            return torch.cat((out_TNH, q_TNH[len(q_TNH) - padding :] * 0 + self.filler))

    class Careless(Padded):
        filler = torch.nan

    padding = replace_declaration(padding=True)
    check_attention_backend(Padded, padding)
    (reason,) = failures(Careless, padding).values()
    assert "the output of padding must be finite" in reason


def test_a_case_that_hangs_is_named_and_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Hangs(Mutant):
        def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
            over.wait()
            return super().attend(layer, q_TNH)

    monkeypatch.setattr(kit, "CASE_TIMEOUT_S", 0.1)
    try:
        ((case, reason),) = failures(Hangs).items()
    finally:
        over.set()
    assert case == str(attention_cases(SMALL)[0])
    assert reason == "was not done after 0.1 s; later cases were not run"


def test_a_case_that_exits_has_failed() -> None:
    class Exits(Mutant):
        def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
            sys.exit(9)

    found = failures(Exits)
    assert len(found) == len(attention_cases(SMALL))
    assert all("SystemExit" in reason for reason in found.values())


# ---- the others ----------------------------------------------------------------------------------


class Growing:
    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        return (0,) * (1 + candidate.hits % 2)


class Floats:
    def rank(self, candidate: Candidate) -> tuple[float, ...]:
        return (candidate.last_used / 2,)


class Lists:
    def rank(self, candidate: Candidate) -> list[int]:
        return [candidate.last_used]


class Forgetful:
    def __init__(self) -> None:
        self.asked = 0

    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        self.asked += 1
        return (-self.asked,)


class Meddler:
    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        candidate.hits = 0
        return (0,)


class Fails:
    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        raise KeyError("planted")


class Dozes:
    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        if candidate.hits % 5 == 4:
            time.sleep(0.06)
        return (candidate.hits,)


class Hoards:
    def __init__(self) -> None:
        self.ghosts: set[bytes] = set()

    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        return (candidate.last_used,)

    def evicted(self, candidate: Candidate) -> None:
        self.ghosts.update(candidate.page_hashes)


class Deaf(Hoards):
    def evicted(self, candidate: Candidate) -> None:
        raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Growing, "others have 1 parts"),
        (Floats, "only ints"),
        (Lists, "must be a tuple"),
        (Forgetful, "in a second call"),
        (Meddler, "raised FrozenInstanceError"),
        (Fails, "raised KeyError"),
        (Dozes, "ranks: rank took [0-9]"),
        (Hoards, "memory: it leaks: a candidate that comes and goes keeps"),
        (Deaf, "random tree, page 1: raised RuntimeError: planted"),
    ],
)
def test_a_broken_strategy_is_named(strategy: type, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if " took " in said:  # it is so by little; any other may look slow on a busy machine
        monkeypatch.setattr(promises, "SLOW_S", 0.05)
    with pytest.raises(ConformanceError, match=said):
        check_eviction_strategy(strategy)


def test_a_strategy_that_hangs_is_given_up_and_its_line_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Findings.timed, "__defaults__", (0.2,))
    over = threading.Event()

    class Hangs:
        def rank(self, candidate: Candidate) -> tuple[int, ...]:
            over.wait()
            return (0,)

    with pytest.raises(
        ConformanceError, match=r"1 of 1 cases failed.*\n.*ranks: not done after 0.2 s, at .*test_kit.py"
    ) as found:
        check_eviction_strategy(Hangs)
    over.set()
    assert "in rank: over.wait()" in str(found.value)


def test_a_strategy_with_dice_evicts_differently_in_a_second_run() -> None:
    rng = np.random.default_rng(0)

    class Dice:
        def rank(self, candidate: Candidate) -> tuple[int, ...]:
            return (int(rng.integers(100)),)

    with pytest.raises(ConformanceError, match="random tree, page 4: the same requests evict different pages"):
        check_eviction_strategy(Dice)


class Policy:
    looks_at_cache = False

    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        return (waiting.priority,)


class ShortestFirst(Policy):
    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        return (waiting.num_tokens,)


class Blind(Policy):
    def rank(self, waiting: Waiting) -> tuple[int, ...]:
        return (-waiting.num_cached_now,)


class Unsure(Policy):
    looks_at_cache = None


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (ShortestFirst, "no request waits forever: a prompt of a million tokens still waits"),
        (Blind, "it ranks by num_cached_now or num_overtaken, but looks_at_cache is False"),
        (Unsure, "looks_at_cache is None"),
    ],
)
def test_a_broken_policy_is_named(policy: type, said: str) -> None:
    check_scheduling_policy(Policy)
    with pytest.raises(ConformanceError, match=said):
        check_scheduling_policy(policy)


class OutOfPlace(ThreadComm):
    def all_reduce(self, tensor: Tensor) -> Tensor:
        return super().all_reduce(tensor.clone())


class OwnOrder(ThreadComm):
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = self._exchange(tensor)
        return torch.cat(parts[self.rank :] + parts[: self.rank], dim)


class LastDim(ThreadComm):
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return super().all_gather(tensor)


class OwnRounding(ThreadComm):
    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange(tensor.clone())
        return tensor.copy_(sum(parts[self.rank :] + parts[: self.rank], torch.zeros_like(tensor)))


class RowsInOtherOrder(ThreadComm):
    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return super().all_to_all(tensor, sent, received).flip(0)


class ExchangeInPlace(ThreadComm):
    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        rows = super().all_to_all(tensor, sent, received)
        tensor.zero_()
        return rows


class ClosesOnce(ThreadComm):
    closed = False

    def close(self) -> None:
        assert not self.closed, "closed before"
        self.closed = True


class Hangs(ThreadComm):
    def close(self) -> None:
        if self.rank == 1:
            threading.Event().wait(20)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OutOfPlace, "all_reduce must sum in place"),
        (OwnOrder, "not every rank's part in rank order"),
        (LastDim, "its shape is"),
        (OwnRounding, "not the same to the bit on ranks 0 and"),
        (RowsInOtherOrder, "not every rank's rows for this one"),
        (ExchangeInPlace, "all_to_all of float32: it changed its input"),
        (ClosesOnce, "close twice: closed before"),
        (Hangs, r"ranks \[1\] were not done"),
    ],
)
def test_a_broken_group_is_named(kind: type[ThreadComm], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(size: int) -> list[ThreadComm]:
        posted: list[Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        return [kind(rank, posted, barrier) for rank in range(size)]

    monkeypatch.setattr(comm_kit, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(comm_proof, "SHAPES", ((5, 7),))
    with pytest.raises(ConformanceError, match=said):
        check_comm(group, sizes=[3])


# ---- stores of KV pages --------------------------------------------------------------------------


class Records:
    """Right but for what a subclass overrides."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def get(self, name: bytes, record: memoryview) -> bool:
        kept = self.kept.get(name)
        if kept is None or len(kept) != len(record):
            return False
        record[:] = kept
        return True

    def put(self, name: bytes, record: memoryview) -> None:
        self.kept[name] = bytes(record)

    def discard(self, name: bytes) -> None:
        self.kept.pop(name, None)

    def close(self) -> None:
        pass


class KeepsTheBuffer(Records):
    def put(self, name: bytes, record: memoryview) -> None:
        self.kept[name] = record  # type: ignore[assignment]


class FindsAnything(Records):
    def get(self, name: bytes, record: memoryview) -> bool:
        return super().get(name, record) or not record.readonly


class MindsNoSizes(Records):
    def get(self, name: bytes, record: memoryview) -> bool:
        kept = self.kept.get(name)
        if kept is None:
            return False
        record[:] = kept[: len(record)].ljust(len(record), b"\0")
        return True


class NeverDiscards(Records):
    def discard(self, name: bytes) -> None:
        pass


class WritesInPlace(Records):
    def put(self, name: bytes, record: memoryview) -> None:
        self.kept[name] = bytes(len(record))
        time.sleep(0.0005)
        self.kept[name] = bytes(record)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (KeepsTheBuffer, "does not come back as it was put"),
        (FindsAnything, "that was never put is found"),
        (MindsNoSizes, "1000 bytes fills 999"),
        (NeverDiscards, "found after its discard"),
        (WritesInPlace, "while it is half written"),
    ],
)
def test_a_broken_store_is_named(kind: type[Records], said: str) -> None:
    check_kv_store(Records)
    with pytest.raises(ConformanceError, match=said):
        check_kv_store(kind)
