"""The whole engine with a model that has states: whatever is cached and however it is computed, no token changes."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from callboard import LLM, Completion, SamplingParams
from engine.features.kv_store.pages import StoredPages
from engine.features.kv_store.records import PageRecords
from engine.features.speculation.drafting import Drafted, Drafter
from engine.features.speculation.messages import Proposals
from engine.features.speculation.payoff import Payoff
from engine.features.states import rank, slots
from engine.features.states.rank import StatesRank
from engine.messages import Step
from engine.plugins.proposer.ngram import NgramProposer
from engine.scheduling.completions import Completions
from engine.scheduling.rows import Sequence
from server.extensions.chaos.sim.liars import Everything, Liar, from_sequences
from tests.models.checkpoints import VOCAB, build, random_tokens, save

OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
STEM = random_tokens(37, seed=9)
PROMPTS = [STEM + random_tokens(length, seed) for seed, length in enumerate((3, 20, 11, 30))]


@pytest.fixture(scope="module", params=["lfm2", pytest.param("qwen3-5", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(request.param), tmp_path_factory.mktemp(request.param))


def engine(checkpoint: Path, **sections: dict[str, Any]) -> LLM:
    sections["kv"] = {"page_size": 4, "num_pages": 400, **sections.get("kv", {})}
    sections["model"] = {"dtype": "float32", "tokenizer": "none", **sections.get("model", {})}
    return LLM(checkpoint, progress=False, config=sections)


def without_snapshots(checkpoint: Path, **sections: dict[str, Any]) -> LLM:
    sections["plugins"] = {"options": {"snapshots.ends": {"prompts": False, "turns": False, "branches": False}}}
    return engine(checkpoint, **sections)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


def cached(completions: list[Completion]) -> list[int]:
    return [one.usage.cached_tokens for one in completions]


def added(number: int) -> list[int]:
    """The tokens between the turns of a conversation."""
    return random_tokens(7, seed=50 + number)


def turns(llm: LLM, params: SamplingParams = GREEDY) -> Iterator[list[Completion]]:
    """Two turns of each conversation, one after the other, and the second one twice."""
    histories = [list(prompt) for prompt in PROMPTS]
    for turn in range(2):
        said = [llm.generate([history], params)[0] for history in histories]
        yield said
        if turn == 0:
            for number, one in enumerate(said):
                histories[number] += [*one.token_ids, *added(number)]
    yield llm.generate(histories, params)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[list[int]]]:
    """The tokens without any cached prefix."""
    with without_snapshots(checkpoint) as llm:
        found = [*turns(llm)]
    assert [cached(one) for one in found] == [[0] * len(PROMPTS)] * 3
    return [tokens(one) for one in found]


def test_cached_prefixes_give_the_same_tokens(checkpoint: Path, alone: list[list[list[int]]]) -> None:
    with engine(checkpoint) as llm:
        found = [*turns(llm)]
    assert [tokens(one) for one in found] == alone
    first, second, again = map(cached, found)
    assert first == [0, 36, 36, 36]
    lengths = [len(prompt) + OUTPUT - 1 for prompt in PROMPTS]
    assert second == [length // 4 * 4 for length in lengths]
    assert again == [(len(prompt) + OUTPUT + 7 - 1) // 4 * 4 for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_so_do_chunks_of_any_size(checkpoint: Path, alone: list[list[list[int]]], chunk: int) -> None:
    limits = {"prefill_chunk": chunk, "max_step_tokens": max(chunk, 8), "max_running": 4}
    with engine(checkpoint, scheduler=limits) as llm:
        assert [tokens(one) for one in turns(llm)] == alone


def test_so_do_evicted_ones(checkpoint: Path, alone: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for about two conversations, and four slots."""
    monkeypatch.setattr(slots, "PAGES_PER_SLOT", 25)
    monkeypatch.setattr(rank, "PAGES_PER_SLOT", 25)
    with engine(checkpoint, kv={"num_pages": 50}, scheduler={"max_running": 2}) as llm:
        found = [*turns(llm)]
    assert [tokens(one) for one in found] == alone
    assert sum(map(sum, map(cached, found))) > 0


def test_so_do_those_that_come_from_a_store(
    checkpoint: Path, alone: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine finds what another one has stored: pages that are worth a wait, and the state behind the last one."""
    store = {"kv_store": "files", "options": {"kv_store.files": {"path": str(tmp_path)}}}
    for expected in ([0, 36, 36, 36], [36] * 4):
        with engine(checkpoint, plugins=store) as llm:
            first, *others = turns(llm)
        assert [tokens(one) for one in (first, *others)] == alone
        assert cached(first) == expected
    load = StoredPages._load

    def nothing(self: StoredPages, place: PageRecords, page_hash: bytes, fetch: Any) -> torch.Tensor | None:
        found = load(self, place, page_hash, fetch)
        if self._states is not None and place is self._states.records and found is not None:
            found.zero_()
        return found

    monkeypatch.setattr(StoredPages, "_load", nothing)
    with engine(checkpoint, plugins=store) as llm:
        assert [tokens(one) for one in turns(llm)] != alone


def test_so_do_those_that_come_back_from_the_host(
    checkpoint: Path, alone: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has room for one conversation and a half, and as much is cached as if it held all four."""
    monkeypatch.setattr(slots, "PAGES_PER_SLOT", 12)
    monkeypatch.setattr(rank, "PAGES_PER_SLOT", 12)
    small: dict[str, Any] = {"scheduler": {"max_running": 1}, "kv": {"num_pages": 30}}
    found = []
    for kv in ({"num_pages": 400}, {}, {"num_host_pages": 200}):
        with engine(checkpoint, **{**small, "kv": small["kv"] | kv}) as llm:
            found.append([*turns(llm)])
    assert [[tokens(one) for one in way] for way in found] == [alone] * 3
    roomy, without, with_host = ([cached(one) for one in way] for way in found)
    assert with_host == roomy
    assert sum(map(sum, without)) < sum(map(sum, roomy))


def test_so_do_rows_that_are_retracted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retract, retracted = Completions.retract, []

    def watched(self: Completions, sequence: Sequence) -> None:
        retracted.append(sequence)
        retract(self, sequence)

    monkeypatch.setattr(Completions, "retract", watched)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [random_tokens(9, seed) for seed in range(4)]
    with without_snapshots(checkpoint) as llm:
        expected = tokens([llm.generate([prompt], params)[0] for prompt in prompts])
    with engine(checkpoint, kv={"num_pages": 30}, scheduler={"max_running": 4}) as llm:
        llm.generate([random_tokens(3, 0)] * 8, SamplingParams(max_tokens=1))  # outputs are short, the planner learns
        found = llm.generate(prompts, params)
    assert tokens(found) == expected
    assert retracted


def test_copies_of_a_prompt_part_after_it(checkpoint: Path) -> None:
    """The choices of a request are such copies."""
    drawn = [SamplingParams(temperature=1.0, max_tokens=OUTPUT, ignore_eos=True, seed=seed) for seed in (5, 6)]
    with without_snapshots(checkpoint) as llm:
        expected = tokens([llm.generate([PROMPTS[1]], one)[0] for one in drawn])
    assert expected[0] != expected[1]
    with engine(checkpoint) as llm:
        for number in range(2):
            found = llm.generate([PROMPTS[1]] * 2, drawn)
            assert tokens(found) == expected
            assert min(cached(found)) == (56 if number else 0)
            assert max(cached(found)) == 56


@contextmanager
def half_right(alone: list[list[list[int]]]) -> Iterator[None]:
    """``ngram`` proposes the next tokens of these conversations, and every other one may be wrong."""
    ends = zip(PROMPTS, alone[0], alone[1], strict=True)
    known = [[*prompt, *first, *added(number), *second] for number, (prompt, first, second) in enumerate(ends)]
    liar = Liar("half", from_sequences(known), VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Payoff, "counts", Everything.counts)
        patch.setattr(Payoff, "knows", Everything.knows)
        patch.setattr(NgramProposer, "open", lambda self: liar.open())
        yield


def test_so_do_proposed_tokens_of_which_some_are_wrong(checkpoint: Path, alone: list[list[list[int]]]) -> None:
    with engine(checkpoint) as llm:
        cached_without = [cached(one) for one in turns(llm)]
    with half_right(alone), engine(checkpoint, plugins={"proposer": "ngram"}) as llm:
        found = [*turns(llm)]
        meter = llm._system.scheduler._planned.meter
    assert [tokens(one) for one in found] == alone
    assert [cached(one) for one in found] == cached_without
    assert sum(meter.proposed_at) > sum(meter.accepted_at) > 0


@pytest.mark.slow
def test_so_do_tokens_of_a_draft_model(
    checkpoint: Path, alone: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    options = {"proposer.draft_model": {"path": str(save(build("llama"), tmp_path))}}
    with engine(checkpoint, plugins={"proposer": "draft_model", "options": options}) as llm:
        assert [tokens(one) for one in turns(llm)] == alone
        assert sum(llm._system.scheduler._planned.meter.proposed_at)


@pytest.mark.slow
def test_so_do_tokens_after_a_draft_on_one_of_two_ranks_found_no_memory(
    checkpoint: Path, alone: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was not cut into parts, nor are later ones: a copy behind a part would have a wrong state."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    draft, drafts = Drafter.draft, []

    def failing(self: Drafter, step: Step, proposals: Proposals) -> Drafted:
        drafts.append(step)
        if len(drafts) == 1:
            raise torch.OutOfMemoryError("planted")
        return draft(self, step, proposals)

    monkeypatch.setattr(Drafter, "draft", failing)
    options = {"proposer.draft_model": {"path": str(save(build("llama"), tmp_path))}}
    plugins = {"proposer": "draft_model", "options": options}
    with engine(checkpoint, plugins=plugins, device={"tensor_parallel": 2}) as llm:
        assert [tokens(one) for one in turns(llm)] == alone
        assert llm._system.executors.num_restarts == 1
    assert len(drafts) > 2


@contextmanager
def twice_lost() -> Iterator[None]:
    """Executors are lost in the 40th step and in the 90th."""
    apply, steps = StatesRank.apply, []

    def failing(self: StatesRank, step: Step) -> Step:
        steps.append(step)
        if len(steps) in (40, 90):
            raise RuntimeError("lost")
        return apply(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatesRank, "apply", failing)
        yield
    assert len(steps) > 90


def test_so_do_executors_that_come_back(checkpoint: Path, alone: list[list[list[int]]]) -> None:
    with twice_lost(), engine(checkpoint) as llm:
        assert [tokens(one) for one in turns(llm)] == alone


def test_with_invariant_numerics_all_ways_have_the_same_bits(checkpoint: Path) -> None:
    """Drawn tokens and their log probabilities: whatever is cached, cut, evicted, or lost."""
    drawn = SamplingParams(temperature=1.0, max_tokens=OUTPUT, ignore_eos=True, seed=3, logprobs=0)
    model, said = {"numerics": "invariant"}, list[list[list[int]]]()

    def digest(llm: LLM) -> str:
        said[:] = []
        found = []
        for turn in turns(llm, drawn):
            said.append(tokens(turn))
            found += [(one.token_ids, [entry.sampled.logprob for entry in one.logprobs]) for one in turn]
        return hashlib.sha256(repr(found).encode()).hexdigest()

    with without_snapshots(checkpoint, model=model) as llm:
        digests = [digest(llm)]
    for chunk, num_pages, num_host in ((1, 400, 0), (7, 400, 0), (64, 400, 0), (64, 60, 0), (64, 60, 400)):
        limits = {"prefill_chunk": chunk, "max_step_tokens": max(chunk, 8), "max_running": 4}
        kv = {"num_pages": num_pages, "num_host_pages": num_host}
        with engine(checkpoint, scheduler=limits, model=model, kv=kv) as llm:
            digests.append(digest(llm))
    with twice_lost(), engine(checkpoint, model=model) as llm:
        digests.append(digest(llm))
    with half_right(said), twice_lost(), engine(checkpoint, model=model, plugins={"proposer": "ngram"}) as llm:
        digests.append(digest(llm))
    assert len({*digests}) == 1, digests
