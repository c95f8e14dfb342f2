"""Several ranks draft by one graph that holds their sums: the right tokens, the same ones on every rank."""

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from callboard import LLM
from engine.actors.step_splitting import StepSplitter
from engine.features.speculation.draft_chain import DraftChain
from engine.features.speculation.draft_model import RankDraft
from engine.features.speculation.drafting import Drafted, Drafter
from engine.features.speculation.messages import Proposals, proposals_of
from engine.features.speculation.payoff import Payoff
from engine.features.speculation.rank import DraftRank
from engine.messages import Step
from engine.startup import loading
from server.extensions.chaos.sim.liars import Everything
from tests.features.speculation.conftest import Guess
from tests.features.speculation.test_captured import (
    ASKED,
    GREEDY,
    PROMPTS,
    Outputs,
    Overlapping,
    accepted,
    directory,
    nearly,
    plain,
)
from tests.graphs.captured_ranks import CapturedComm, new_group
from tests.graphs.conftest import collector
from tests.graphs.engines import install
from tests.models.checkpoints import build, save
from tests.models.eagle_heads import ReferenceHead, save_head

__all__ = ["collector", "directory", "nearly", "plain"]

NUM_RANKS = 2


class Ranks:
    """What each rank does.  graphs: of each draft, the graphs that were replayed; 0 where passes ran one by one.

    sums: of each draft, the sums that the host launched.  drafted: the tokens of each row."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: dict[int, list[int]] = defaultdict(list)
        self.sums: dict[int, list[int]] = defaultdict(list)
        self.drafted: dict[int, list[dict[int, bytes]]] = defaultdict(list)
        self.comms: list[CapturedComm] = []
        self._lock = threading.Lock()
        patch.setattr(Payoff, "counts", Everything.counts)
        patch.setattr(Payoff, "knows", Everything.knows)
        patch.setattr(loading, "_connect", self._connect)
        install(patch)
        draft, new = Drafter._draft, DraftRank._new_drafter
        of_drafter: dict[int, RankDraft] = {}

        def made(rank: DraftRank) -> Drafter:
            drafter = new(rank)
            of_drafter[id(drafter)] = rank._draft
            return drafter

        def drafting(drafter: Drafter, step: Step, proposals: Proposals) -> Drafted:
            rank = of_drafter[id(drafter)]
            comm, replays = rank._comm, rank._graphs.device.replays
            graphs_before, sums_before = len(replays), comm.num_sums
            drafted = draft(drafter, step, proposals)
            self.graphs[comm.rank].append(len(replays) - graphs_before)
            self.sums[comm.rank].append(comm.num_sums - sums_before)
            self.drafted[comm.rank].append(drafted.by_row())
            return drafted

        patch.setattr(DraftRank, "_new_drafter", made)
        patch.setattr(Drafter, "_draft", drafting)

    def _connect(self, config: Any, plugins: Any, rank: int, *_: Any) -> CapturedComm:
        with self._lock:
            if not self.comms or self.comms[0].is_closed:
                self.comms = new_group(NUM_RANKS)
        return self.comms[rank]


def engine(directory: Path, proposer: str, **options: Any) -> LLM:
    return LLM(
        directory,
        progress=False,
        config={
            "model": {"tokenizer": "none", "dtype": "float32", "max_model_len": 64},
            "device": {"threads": 1, "kind": "cpu", "tensor_parallel": NUM_RANKS},
            "kv": {"num_pages": 200, "page_size": 4},
            "scheduler": {"max_running": 2, "prefill_chunk": 16, "max_step_tokens": 24},
            "graphs": {"mode": "decode", "max_rows": 8},
            "placement": {"max_restarts": 0},
            "plugins": {
                "attention": "torch",
                "proposer": proposer,
                "options": {f"proposer.{proposer}": options},
            },
        },
    )


def test_ranks_that_draft_by_one_graph_are_always_right(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steady step's passes are one launch; one by one they are three passes with a sum after each part of a layer."""
    ranks = Ranks(monkeypatch)
    with engine(directory, "draft_model", path=str(directory), num_tokens=3) as llm:
        right, wrong = accepted(llm, plain["greedy"])
    assert wrong == 0
    assert right >= 30
    assert ranks.drafted[0] == ranks.drafted[1]
    launched = [list(zip(ranks.graphs[rank], ranks.sums[rank], strict=True)) for rank in range(NUM_RANKS)]
    assert launched[0] == launched[1]
    assert launched[0].count((1, 0)) >= 4


@pytest.mark.slow
def test_passes_whose_sums_no_graph_can_hold_run_one_by_one(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedComm, "capturable", False)
    ranks = Ranks(monkeypatch)
    with engine(directory, "draft_model", path=str(directory), num_tokens=3) as llm:
        assert accepted(llm, plain["greedy"])[1] == 0
    assert set(ranks.graphs[0]) == {0}
    assert min(ranks.sums[0]) > 0


@pytest.mark.slow
def test_steps_of_ranks_that_draft_and_verify_overlap(
    directory: Path, nearly: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, steps = Ranks(monkeypatch), Overlapping(monkeypatch)
    with engine(directory, "draft_model", path=str(nearly), num_tokens=3) as llm:
        for asked in ("greedy", "drawn"):
            found = llm.generate(PROMPTS, ASKED[asked])
            assert [one.token_ids for one in found] == plain[asked]
            assert sum(one.usage.accepted_tokens for one in found) > 0
            assert sum(one.usage.rejected_tokens for one in found) > 0
    assert ranks.drafted[0] == ranks.drafted[1]
    assert steps.num_counted > steps.num_verifying / 5


@pytest.mark.slow
def test_ranks_of_which_one_has_no_room_for_a_step_that_overlaps_start_again_with_a_limit(
    directory: Path, nearly: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with any other step: it is no fault, of which none is allowed here."""
    Ranks(monkeypatch)
    drafting, failed = Drafter._replay_counted, list[int]()

    def short(drafter: Drafter, *given: Any) -> Any:
        if threading.current_thread().name == "executor1" and not failed:
            failed.append(1)
            raise MemoryError("planted")  # while the other rank waits for this one
        return drafting(drafter, *given)

    monkeypatch.setattr(Drafter, "_replay_counted", short)
    with engine(directory, "draft_model", path=str(nearly), num_tokens=3) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == plain["greedy"]
    assert failed


@pytest.mark.slow
def test_steps_of_ranks_that_overlap_and_are_too_large_are_cut_alike(
    directory: Path, nearly: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, launch = Ranks(monkeypatch), StepSplitter.launch
    cut: dict[str, list[int]] = defaultdict(list)

    def launching(splitter: StepSplitter, step: Step) -> Any:
        is_counted = bool(proposals_of(step).counted)
        cut[threading.current_thread().name] += [step.step_id] * is_counted
        splitter._most_tokens = 5 * is_counted
        return launch(splitter, step)

    monkeypatch.setattr(StepSplitter, "launch", launching)
    with engine(directory, "draft_model", path=str(nearly), num_tokens=3) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == plain["greedy"]
    assert cut["executor0"] == cut["executor1"] != []
    assert ranks.drafted[0] == ranks.drafted[1]


@pytest.mark.slow
def test_a_sum_that_leaves_out_rows_is_noticed(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sum outside of a graph would, of the first pass, which has padding between rows."""
    ranks, add, run = Ranks(monkeypatch), CapturedComm.all_reduce, DraftChain._run
    drafting = threading.local()

    def running(chain: DraftChain, size: int) -> Tensor:
        drafting.now = True
        try:
            return run(chain, size)
        finally:
            drafting.now = False

    def first(comm: CapturedComm, tensor: Tensor) -> Tensor:
        add(comm, tensor[: len(tensor) // 2] if getattr(drafting, "now", False) else tensor)
        return tensor

    monkeypatch.setattr(DraftChain, "_run", running)
    monkeypatch.setattr(CapturedComm, "all_reduce", first)
    with engine(directory, "draft_model", path=str(directory), num_tokens=3) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert 1 in ranks.graphs[0]
    assert sum(one.usage.rejected_tokens for one in found) > 0


@pytest.mark.slow
def test_ranks_guess_by_one_graph_with_a_head(
    plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, guesses: list[Guess], tmp_path: Path
) -> None:
    model = build("llama")
    directory = save(model, tmp_path / "model")
    head = save_head(model, tmp_path / "head", draft_vocab_size=200, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    ranks = Ranks(monkeypatch)
    with engine(directory, "eagle", path=str(head), num_tokens=3) as llm:
        accepted(llm, plain["greedy"])
    reference = ReferenceHead(model, head)
    assert guesses
    for known, guessed in guesses:
        assert guessed == reference.guess(known, len(guessed)), f"behind {len(known)} tokens"
    assert ranks.drafted[0] == ranks.drafted[1]
    assert ranks.graphs[0].count(1) >= 4
