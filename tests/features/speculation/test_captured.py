"""Speculation in graphs: a step that verifies is a captured one, with the tokens of transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from callboard import LLM, SamplingParams
from engine.actors.step_splitting import StepSplitter
from engine.execution.runner import ModelRunner
from engine.features.speculation.counted_tokens import CountedTokens
from engine.features.speculation.draft_chain import DraftChain
from engine.features.speculation.drafting import Drafted, Drafter
from engine.features.speculation.known_lengths import KnownLengths
from engine.features.speculation.messages import NAME, Proposals, proposals_of
from engine.features.speculation.overlaps import Overlaps
from engine.features.speculation.payoff import Payoff
from engine.graphs import inputs as torch_inputs
from engine.graphs.decode import DecodeGraphs
from engine.messages import Step
from engine.plugins.proposer.ngram import NgramProposer
from server.extensions.chaos.sim.liars import Everything, Liar, LiarSession
from tests.features.speculation.conftest import Guess
from tests.graphs.engines import install
from tests.graphs.recording import RecordedGraph
from tests.models.checkpoints import build, random_tokens, save
from tests.models.eagle_heads import ReferenceHead, save_head
from tests.models.mtp_heads import ReferenceMTP

VOCAB = 259
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((1, 5, 17, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ASKED = {
    "greedy": [GREEDY] * 4,
    "drawn": [GREEDY.replace(temperature=0.9, seed=seed, top_k=seed % 3 * 20) for seed in range(4)],
    "behind the graph": [GREEDY.replace(logprobs=2, temperature=seed / 5, seed=seed) for seed in range(4)],
    "some alone": [GREEDY.replace(repetition_penalty=1.2 if seed % 2 else 1.0) for seed in range(4)],
}
Outputs = list[list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def engine(directory: Path, mode: str, proposer: str = "none", **options: Any) -> LLM:
    return LLM(
        directory,
        progress=False,
        config={
            "model": {"tokenizer": "none", "dtype": "float32", "max_model_len": 64},
            "device": {"threads": 1, "kind": "cpu"},
            "kv": {"num_pages": 200, "page_size": 4},
            "scheduler": {"max_running": 4, "prefill_chunk": 16, "max_step_tokens": 24},
            "graphs": {"mode": mode},
            "placement": {"max_restarts": 0},
            "plugins": {
                "attention": "torch",
                "proposer": proposer,
                "options": {f"proposer.{proposer}": options} if options else {},
            },
        },
    )


def outputs(llm: LLM, params: list[SamplingParams]) -> Outputs:
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[str, Outputs]:
    """Without graphs and without speculation."""
    with engine(directory, "off") as llm:
        return {name: outputs(llm, params) for name, params in ASKED.items()}


class Verified:
    """The steps that verify proposals without a prompt: numbers of graphs of those that ran whole, and others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[int] = []
        self.others = 0
        self.devices = install(patch)
        run, run_whole = ModelRunner._run, ModelRunner._run_whole

        def running(runner: ModelRunner, step: Step) -> Any:
            self.others += NAME in step.parts and step.prefill_samples == step.prefill_lengths and not step.admissions
            return run(runner, step)

        def running_whole(runner: ModelRunner, whole: Any, step: Step) -> Any:
            before = len(self.devices[-1].replays)
            launched = run_whole(runner, whole, step)
            if NAME in step.parts:
                self.graphs.append(len(self.devices[-1].replays) - before)
            return launched

        patch.setattr(ModelRunner, "_run", running)
        patch.setattr(ModelRunner, "_run_whole", running_whole)


def lies(patch: pytest.MonkeyPatch, plain: dict[str, Outputs]) -> Liar:
    """What is proposed, all of which is verified."""
    texts = [[*prompt, *tokens] for way in plain.values() for prompt, tokens in zip(PROMPTS, way, strict=True)]

    def next_token(tokens: Sequence[int]) -> int:
        at = len(tokens)
        return next((text[at] for text in texts if len(text) > at and text[:at] == list(tokens)), 0)

    liar = Liar("half", next_token, VOCAB)
    patch.setattr(NgramProposer, "open", lambda self: LiarSession(liar))
    patch.setattr(Payoff, "counts", Everything.counts)
    return liar


@pytest.fixture(scope="module")
def speculating(directory: Path, plain: dict[str, Outputs]) -> Iterator[tuple[LLM, Liar, Verified]]:
    with pytest.MonkeyPatch.context() as patch:
        liar, verified = lies(patch, plain), Verified(patch)
        with engine(directory, "decode", "ngram", num_tokens=3) as llm:
            yield llm, liar, verified


def test_greedy_tokens_are_those_of_transformers(directory: Path, plain: dict[str, Outputs]) -> None:
    """The tests below compare with them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, plain["greedy"], strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # a token of the prompt may be the one that pads
        found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=None)
        assert found[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ["right", "half", "wrong", "moody"])
def test_what_is_verified_is_one_captured_step_with_the_tokens_of_engines_without(
    plain: dict[str, Outputs], speculating: tuple[LLM, Liar, Verified], kind: str, asked: str
) -> None:
    llm, liar, verified = speculating
    liar.kind = kind
    verified.graphs.clear()
    for _ in range(2):  # then with prompts and outputs in the cache
        assert outputs(llm, ASKED[asked]) == plain[asked]
    assert verified.others == 0
    # The model up to the logits, and a sampler unless the step is sampled behind the graph.
    assert set(verified.graphs) == {1 if asked == "behind the graph" else 2}


def test_a_row_whose_prompt_was_scored_is_verified_by_graphs(
    plain: dict[str, Outputs], speculating: tuple[LLM, Liar, Verified]
) -> None:
    llm, liar, verified = speculating
    liar.kind = "right"
    verified.graphs.clear()
    assert outputs(llm, [GREEDY.replace(prompt_logprobs=1), *[GREEDY] * 3]) == plain["greedy"]
    assert verified.others == 0
    assert verified.graphs


def test_there_are_graphs_for_all_rows_with_all_their_tokens(speculating: tuple[LLM, Liar, Verified]) -> None:
    _, _, verified = speculating
    assert verified.devices[0].graphs[0].size == 4 * (1 + 3)


@pytest.mark.parametrize("fault", ["length", "position", "place"])
def test_a_place_with_a_wrong_length_or_position_is_noticed(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The tests above rely on this: a place reads the keys up to its own, and the host's positions count."""
    fill = torch_inputs.fill_inputs

    def wrong(rows_B: Any, given_B: Any, tokens_RM: Any, pages_RP: Any, lengths_R: Any, *rest: Any) -> None:
        stated = torch.full_like(given_B, -1) if fault == "position" else given_B
        fill(rows_B, stated, tokens_RM, pages_RP, lengths_R, *rest)
        inputs = rest[2]
        if fault == "length":
            inputs.lengths_B.copy_(torch.where(given_B < 0, inputs.lengths_B, inputs.lengths_B - 1))
        if fault == "place":
            inputs.write_at_B.copy_(torch.where(given_B < 0, inputs.write_at_B, inputs.write_at_B.roll(1)))

    ops = torch_inputs.InputOps(wrong, torch_inputs.write_tokens)
    monkeypatch.setattr("engine.graphs.decode.choose_inputs", lambda device: ops)
    install(monkeypatch)
    lies(monkeypatch, plain)
    with engine(directory, "decode", "ngram", num_tokens=1) as llm:
        assert outputs(llm, ASKED["greedy"]) != plain["greedy"]


# ---- drafts -------------------------------------------------------------------------------------


def drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Everything that fits is drafted.  The numbers of graphs of each draft; 0 where passes ran one by one."""
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    devices, found = install(monkeypatch), list[int]()
    draft = Drafter._draft

    def counted(self: Drafter, step: Step, proposals: Proposals) -> Drafted:
        before = len(devices[-1].replays)
        drafted = draft(self, step, proposals)
        found.append(len(devices[-1].replays) - before)
        return drafted

    monkeypatch.setattr(Drafter, "_draft", counted)
    return found


def accepted(llm: LLM, expected: Outputs) -> tuple[int, int]:
    """Proposed tokens that were right, and the others."""
    found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == expected
    return sum(one.usage.accepted_tokens for one in found), sum(one.usage.rejected_tokens for one in found)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_model_that_drafts_for_itself_by_one_graph_is_always_right(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    graphs = drafts(monkeypatch)
    with engine(directory, "decode", "draft_model", path=str(directory), num_tokens=num_tokens) as llm:
        for _ in range(2):  # then with prompts and outputs in the cache
            right, wrong = accepted(llm, plain["greedy"])
            assert wrong == 0
            assert right >= 40 * num_tokens // (num_tokens + 1)
    assert set(graphs) == {0, 1}  # prompts are read by passes of their own
    assert graphs.count(1) >= 4


class Overlapping:
    """Steps that verify: how many there are, and how many of them were launched before the tokens in front came."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_verifying = self.num_counted = 0
        self.step_id, self.is_counted = -1, False
        launch = ModelRunner.launch

        def counted(runner: ModelRunner, step: Step) -> Any:
            proposals = proposals_of(step)
            self.num_verifying += bool(proposals.rows)
            self.num_counted += bool(proposals.counted)
            return launch(runner, step)

        patch.setattr(ModelRunner, "launch", counted)


@pytest.fixture(scope="module")
def nearly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that drafts what is right about every other time."""
    model, generator = build("llama"), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn(one.shape, generator=generator) * 0.1 * one.abs().mean())
    return save(model, tmp_path_factory.mktemp("nearly"))


def test_steps_that_draft_and_verify_overlap(
    directory: Path, nearly: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts(monkeypatch)
    steps = Overlapping(monkeypatch)
    with engine(directory, "decode", "draft_model", path=str(nearly), num_tokens=3) as llm:
        for asked in ("greedy", "drawn"):
            found = llm.generate(PROMPTS, ASKED[asked])
            assert [one.token_ids for one in found] == plain[asked]
            assert sum(one.usage.accepted_tokens for one in found) > 0
            assert sum(one.usage.rejected_tokens for one in found) > 0
    print(f"{steps.num_verifying} steps verify, {steps.num_counted} without a wait of the host")
    assert steps.num_counted > steps.num_verifying / 3


class Short:
    """Steps without room, up to three: in front of one that overlaps, or such steps.

    place: "draft" or "step", which fails, or "cut": the step is known to be too large."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: Overlapping, place: str, *, counted: bool) -> None:
        self.failed: list[int] = []
        self._steps, self._counted = steps, counted
        launch, replay = StepSplitter.launch, DecodeGraphs.launch
        name = "_replay_counted" if counted else "_replay"
        draft = getattr(Drafter, name)

        def launching(splitter: StepSplitter, step: Step) -> Any:
            proposals = proposals_of(step)
            steps.step_id, steps.is_counted = step.step_id, bool(proposals.counted)
            proposed = bool(proposals.rows) and not step.admissions
            splitter._most_tokens = 6 if place == "cut" and proposed and self._now() else 0
            return launch(splitter, step)

        def replaying(graphs: DecodeGraphs, *given: Any) -> Any:
            decoded = replay(graphs, *given)
            if place == "step" and self._now():  # for something behind the graph
                raise MemoryError("no room")
            return decoded

        def drafting(drafter: Drafter, *given: Any) -> Any:
            if place == "draft" and self._now():
                raise MemoryError("no room")
            return draft(drafter, *given)

        patch.setattr(StepSplitter, "launch", launching)
        patch.setattr(DecodeGraphs, "launch", replaying)
        patch.setattr(Drafter, name, drafting)

    def _now(self) -> bool:
        steps = self._steps
        if steps.step_id in self.failed or len(self.failed) >= 3 or not steps.num_counted:
            return False
        if steps.is_counted != self._counted:
            return False
        self.failed.append(steps.step_id)
        return True


LONGER = [GREEDY.replace(max_tokens=22)] * 3 + [GREEDY]


@pytest.fixture(scope="module")
def longer(directory: Path) -> Outputs:
    """Without graphs and without speculation."""
    with engine(directory, "off") as llm:
        return outputs(llm, LONGER)


def without_room(
    directory: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, place: str, *, counted: bool
) -> Outputs:
    """The outputs of an engine in which steps that draft have no room; one row of a step that overlaps only decodes."""
    drafts(monkeypatch)
    drafted = Overlaps.drafted
    monkeypatch.setattr(Overlaps, "drafted", lambda self, rows: drafted(self, rows)[1:])
    short = Short(monkeypatch, Overlapping(monkeypatch), place, counted=counted)
    with engine(directory, "decode", "draft_model", path=str(draft), num_tokens=3) as llm:
        found = outputs(llm, LONGER)
    assert short.failed
    return found


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("place", ["draft", "step", "cut"])
def test_steps_that_overlap_go_on_where_one_has_no_room(
    directory: Path, nearly: Path, longer: Outputs, monkeypatch: pytest.MonkeyPatch, place: str, counted: bool
) -> None:
    """A step is launched in parts, or verifies nothing: what it had drafted does not count.  No executor restarts."""
    assert without_room(directory, nearly, monkeypatch, place, counted=counted) == longer


def _one_more(self: CountedTokens, rows_B: Any, ends_B: Any) -> None:
    self._begun = None


def _planned_lengths(self: CountedTokens) -> Any:
    return self._counts.before_R.cpu().numpy()


def _planned_counts(self: Drafter) -> Any:
    asked, lengths_R = self._asked, known(self)
    self._asked = asked
    return lengths_R


known = Drafter.known
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "a step with no draft counts none": (CountedTokens, "put", _one_more, "draft"),
    "positions are the planned ones": (KnownLengths, "step", lambda self, step: step, "step"),
    "positions of a cut step are the planned ones": (KnownLengths, "step", lambda self, step: step, "cut"),
    "drafts are where they were planned": (
        KnownLengths,
        "proposals",
        lambda self, one: structs.replace(one, counted=b""),
        "cut",
    ),
    "lengths on the device stay the planned ones": (CountedTokens, "read", _planned_lengths, "step"),
    "the next step counts from the planned ends": (Drafter, "known", _planned_counts, "step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_where_a_step_that_overlaps_has_no_room_is_noticed(
    directory: Path, nearly: Path, longer: Outputs, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, name, wrong, place = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    assert without_room(directory, nearly, monkeypatch, place, counted=True) != longer


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["length", "lacking"])
def test_a_wrong_count_on_the_device_is_noticed(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The test above relies on this; a draft that has not read the new tokens guesses wrongly."""
    drafts(monkeypatch)
    steps, end = Overlapping(monkeypatch), CountedTokens.end

    def wrong(self: CountedTokens, lacking: Any) -> None:
        end(self, lacking if fault == "length" else lambda counts_B, right_B: torch.zeros_like(right_B))
        if fault == "length" and self._counts is not None:
            self._counts.lengths_R.sub_(1).clamp_(min=1)

    monkeypatch.setattr(CountedTokens, "end", wrong)
    with engine(directory, "decode", "draft_model", path=str(directory), num_tokens=3) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert steps.num_counted > 0
    tokens_differ = [one.token_ids for one in found] != plain["greedy"]
    assert tokens_differ or sum(one.usage.rejected_tokens for one in found) > 0


@pytest.mark.parametrize("fault", ["position", "token", "place"])
def test_a_draft_with_a_wrong_place_is_noticed(
    directory: Path, plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The test above relies on this: drafting for itself is right only if everything is in its place."""
    graphs, replay = drafts(monkeypatch), DraftChain.replay

    def wrong(self: DraftChain, rows_B: Any, ends_B: Any, lacking_B: Any, counts_B: Any) -> None:
        if fault == "token":  # as if the last of the right tokens had been read
            lacking_B = np.minimum(lacking_B, 1)
        replay(self, rows_B, ends_B - (fault == "position"), lacking_B, counts_B - (fault == "place"))

    monkeypatch.setattr(DraftChain, "replay", wrong)
    with engine(directory, "decode", "draft_model", path=str(directory), num_tokens=3) as llm:
        _, rejected = accepted(llm, plain["greedy"])
    assert 1 in graphs
    assert rejected > 0


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_head_guesses_by_one_graph_what_the_definition_guesses(
    plain: dict[str, Outputs], monkeypatch: pytest.MonkeyPatch, guesses: list[Guess], tmp_path: Path, num_tokens: int
) -> None:
    model = build("llama")
    directory = save(model, tmp_path / "model")
    head = save_head(model, tmp_path / "head", draft_vocab_size=200, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    graphs = drafts(monkeypatch)
    with engine(directory, "decode", "eagle", path=str(head), num_tokens=num_tokens) as llm:
        for _ in range(2):
            accepted(llm, plain["greedy"])
    reference = ReferenceHead(model, head)
    assert guesses
    for known, guessed in guesses:
        assert guessed == reference.guess(known, len(guessed)), f"behind {len(known)} tokens"
    assert graphs.count(1) >= 4


@pytest.mark.slow
def test_a_models_own_layer_guesses_by_one_graph_what_the_definition_guesses(
    monkeypatch: pytest.MonkeyPatch, guesses: list[Guess], tmp_path: Path
) -> None:
    reference = ReferenceMTP("qwen3-5")
    directory = reference.save(tmp_path / "model")
    with engine(directory, "off") as llm:
        expected = outputs(llm, [GREEDY] * 4)
    graphs = drafts(monkeypatch)
    with engine(directory, "decode", "mtp", num_tokens=3) as llm:
        accepted(llm, expected)
    assert guesses
    for known, guessed in guesses:
        assert guessed == reference.guess(known, len(guessed)), f"behind {len(known)} tokens"
    assert graphs.count(1) >= 4


class Operations(TorchDispatchMode):
    """Counts operations of torch that the host launches, without those of replays."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.number = 0
        self._is_replaying = False
        replay = RecordedGraph.replay

        def replaying(graph: RecordedGraph) -> None:
            self.number, self._is_replaying = self.number + 1, True
            try:
                replay(graph)
            finally:
                self._is_replaying = False

        patch.setattr(RecordedGraph, "replay", replaying)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (self._is_replaying or func.is_view)
        return func(*args, **(kwargs or {}))


def launched(directory: Path, monkeypatch: pytest.MonkeyPatch, *, by_graphs: bool) -> int:
    """The number of launches of a steady step that drafts three tokens of each row and verifies them."""
    drafts(monkeypatch)
    operations, numbers = Operations(monkeypatch), list[int]()
    launch = ModelRunner.launch

    def counted(self: ModelRunner, step: Step) -> Any:
        operations.number = 0
        with operations:
            launched = launch(self, step)
        if NAME in step.parts and not step.admissions:
            numbers.append(operations.number)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", counted)
    if not by_graphs:
        monkeypatch.setattr(DraftChain, "fits", lambda self, num_rows: False)
        monkeypatch.setattr(DecodeGraphs, "fits", lambda self, num_rows: False)
    with engine(directory, "breakable", "draft_model", path=str(directory), num_tokens=3) as llm:
        llm.generate(PROMPTS, GREEDY.replace(max_tokens=12))
    return min(numbers)


def test_a_step_that_drafts_and_verifies_costs_the_host_a_tenth_of_the_launches(directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        by_graphs = launched(directory, patch, by_graphs=True)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one = launched(directory, patch, by_graphs=False)
    print(f"launches of a step: {one_by_one} one by one, {by_graphs} by graphs")
    assert by_graphs < one_by_one / 10
