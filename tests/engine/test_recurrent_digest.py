"""Two hundred requests to a model with recurrent layers have one digest, however they are served.

A model with the delta rule and one with a decay alone are served in every way.  The other families share all code but
that of their layers: for them one way has chunks, proposed tokens and copies at once, and another has two ranks.
Models with experts get fewer requests: on a CPU each expert is a product of its own."""

import hashlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callboard import LLM, SamplingParams
from engine.execution import runner
from engine.features.speculation.payoff import Payoff
from engine.features.states import rank
from engine.features.states.messages import StateCopies
from engine.features.states.planner import StatesPlanner
from engine.features.states.rank import StatesRank
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.messages import Step, StepDone
from engine.plugins.proposer.ngram import NgramProposer
from engine.scheduling.completions import Completions
from engine.scheduling.step_builder import InFlight
from server.extensions.chaos.sim.liars import Everything, Liar, from_sequences
from tests.models.checkpoints import VOCAB, build, random_tokens, save
from tests.workers.executors import children, send

pytestmark = pytest.mark.slow

NUMBER, NUMBER_OF_OTHERS, NUMBER_WITH_EXPERTS = 200, 80, 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32", "tokenizer": "none", "numerics": "invariant"},
    "device": {"threads": 1},
    "kv": {"num_pages": 512},
}
PROPOSER = {"plugins": {"proposer": "ngram"}}
STORE = {"scheduler": {"max_running": 4}, "kv": {"num_pages": 24}, "plugins": {"kv_store": "files"}}
HOST = {"scheduler": {"max_running": 4}, "kv": {"num_pages": 24, "num_host_pages": 512}}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"scheduler": {"max_running": 1}},
    "in chunks of 1": {"scheduler": {"prefill_chunk": 1}},
    "in chunks of 7": {"scheduler": {"prefill_chunk": 7, "max_step_tokens": 16}},
    "in chunks of 64": {"scheduler": {"prefill_chunk": 64, "max_step_tokens": 64, "max_running": 5}},
    "evicted and retracted": {"kv": {"num_pages": 12}},
    "with proposed tokens": PROPOSER,
    "on two ranks": {"device": {"threads": 1, "tensor_parallel": 2}},
    "from the host": HOST,
    "from a store": STORE,
    "killed twice, from the host, with proposed tokens": {**HOST, **PROPOSER, "placement": {"executor": "process"}},
    "in chunks of 7, from the host, with proposed tokens": {
        **HOST,
        **PROPOSER,
        "scheduler": {"max_running": 4, "prefill_chunk": 7, "max_step_tokens": 16},
    },
}
WAYS_OF_OTHERS = ("in chunks of 7, from the host, with proposed tokens", "on two ranks")


def prompts(directory: Path) -> list[list[int]]:
    """Return prompts of up to 60 tokens for a model; two of three begin as others do."""
    roots = [random_tokens(40, seed) for seed in range(6)]
    return [
        (roots[index % 6][: 5 + index % 36] if index % 3 else []) + random_tokens(1 + index % 20, index)
        for index in range(number_for(directory))
    ]


def number_for(directory: Path) -> int:
    if directory.name in WITH_EXPERTS:
        return NUMBER_WITH_EXPERTS
    return NUMBER if directory.name in IN_EVERY_WAY else NUMBER_OF_OTHERS


@dataclass
class Served:
    """The results of all requests, and of the same again, with what is cached of them: digests, and whole sequences.

    num_cached: tokens that were cached, the second time.  num_restarts: of executors.
    num_proposed, num_accepted: tokens that were verified, and those that were right."""

    digests: list[str]
    sequences: list[list[int]]
    num_cached: int
    num_restarts: int
    num_proposed: int
    num_accepted: int


def serve(directory: Path, tables: dict[str, Any]) -> Served:
    with LLM(directory, progress=False, config=CONFIG | tables) as llm:
        twice = [llm.generate(prompts(directory), PARAMS) for _ in range(2)]
        meter, num_restarts = llm._system.scheduler._planned.meter, llm._system.executors.num_restarts
    found = [[(one.token_ids, one.logprobs) for one in completions] for completions in twice]
    return Served(
        digests=[hashlib.sha256(repr(one).encode()).hexdigest() for one in found],
        sequences=[[*prompt, *one.token_ids] for prompt, one in zip(prompts(directory), twice[0], strict=True)],
        num_cached=sum(one.usage.cached_tokens for one in twice[1]),
        num_restarts=num_restarts,
        num_proposed=sum(meter.proposed_at),
        num_accepted=sum(meter.accepted_at),
    )


# Without Kimi-Linear, whose pages keep latents: invariant numerics are refused for it.
WITH_EXPERTS = ["qwen3-next", "qwen3-5-moe", "granite4-hybrid-experts", "lfm2-moe", "nemotron-h-experts", "minimax"]
MEMBERS = ["qwen3-5", "granite4-hybrid", "lfm2", "olmo-hybrid", "nemotron-h", "falcon-h1", "bamba", *WITH_EXPERTS]
IN_EVERY_WAY = ("qwen3-5", "granite4-hybrid-experts")
in_every_way = pytest.mark.parametrize("checkpoint", IN_EVERY_WAY, indirect=True)
others = pytest.mark.parametrize("checkpoint", [one for one in MEMBERS if one not in IN_EVERY_WAY], indirect=True)
# A norm over all heads together, whose squares ranks add up, and experts, whose results they do.
OTHER_BITS_ON_TWO_RANKS = ("olmo-hybrid", *WITH_EXPERTS)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model that the folder's name says."""
    return save(build(request.param), tmp_path_factory.mktemp("checkpoint") / request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Served:
    served = serve(checkpoint, {})
    assert served.digests == served.digests[:1] * 2
    return served


@pytest.fixture
def half_right(expected: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ngram`` proposes the next tokens, and every other one may be wrong."""
    liar = Liar("half", from_sequences(expected.sequences), VOCAB)
    monkeypatch.setattr(NgramProposer, "open", lambda self: liar.open())
    monkeypatch.setattr(Payoff, "counts", Everything.counts)
    monkeypatch.setattr(Payoff, "knows", Everything.knows)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill an executor in a process of its own when it has answered 50 steps of this test, and again after 100."""
    complete, num_steps = Completions.complete, iter(range(1 << 30))

    def killing(self: Completions, done: StepDone) -> None:
        if next(num_steps) in (50, 100) and children():
            send(signal.SIGKILL)
        complete(self, done)

    monkeypatch.setattr(Completions, "complete", killing)


@in_every_way
@pytest.mark.usefixtures("half_right", "kills")
@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way]])
def test_all_ways_have_one_digest(checkpoint: Path, expected: Served, way: str, tmp_path: Path) -> None:
    check(checkpoint, expected, way, tmp_path)


@others
@pytest.mark.usefixtures("half_right")
@pytest.mark.parametrize("way", WAYS_OF_OTHERS)
def test_other_families_have_one_digest_too(checkpoint: Path, expected: Served, way: str, tmp_path: Path) -> None:
    check(checkpoint, expected, way, tmp_path)


def check(checkpoint: Path, expected: Served, way: str, tmp_path: Path) -> None:
    if way == "on two ranks" and checkpoint.name in OTHER_BITS_ON_TWO_RANKS:
        pytest.skip("ranks add up what one rank adds in another order")
    tables = WAYS[way]
    if tables is STORE:
        tables = {**STORE, "plugins": {**STORE["plugins"], "options": {"kv_store.files": {"path": str(tmp_path)}}}}
    served = serve(checkpoint, tables)
    assert served.digests == expected.digests
    assert served.num_restarts == (2 if "placement" in WAYS[way] else 0)
    if WAYS[way] in (HOST, STORE):
        assert served.num_cached > number_for(checkpoint) // 2, (
            "hardly more is cached than without: 16 tokens of 200 requests"
        )
    if WAYS[way].get("plugins") == PROPOSER["plugins"]:
        assert served.num_proposed > served.num_accepted > 0


def restored_from_another(patch: pytest.MonkeyPatch) -> None:
    """Let a row start with the state of another snapshot."""
    copies_of = rank.copies_of

    def neighbours(step: Step) -> StateCopies:
        copies = copies_of(step)
        pairs = np.frombuffer(copies.before, dtype=np.int32).reshape(2, -1).copy()
        pairs[0] ^= 1
        return StateCopies(before=pairs.tobytes(), after=copies.after)

    patch.setattr(rank, "copies_of", neighbours)


def taken_late(patch: pytest.MonkeyPatch) -> None:
    """Let a snapshot be taken behind the next step."""
    launched, late = StatesRank.launched, []

    def next_time(self: StatesRank, step: Step, result: Any) -> None:
        for one in late:
            launched(self, one, result)
        late[:] = [step]

    patch.setattr(StatesRank, "launched", next_time)


def begun_with_what_was_there(patch: pytest.MonkeyPatch) -> None:
    """Let a row begin with what its slot holds."""

    def later(states: RecurrentStates, slots_B: Any, lengths_B: Any, query_lengths_B: Any) -> StatesOfStep:
        return StatesOfStep(states, slots_B, lengths_B + np.int32(1), query_lengths_B)

    patch.setattr(runner, "StatesOfStep", later)


@in_every_way
@pytest.mark.parametrize("mistake", [restored_from_another, taken_late, begun_with_what_was_there])
def test_a_mistake_in_states_gives_another_digest(
    checkpoint: Path, expected: Served, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert serve(checkpoint, {"scheduler": {"max_running": 6}}).digests != expected.digests


@in_every_way
@pytest.mark.usefixtures("half_right")
def test_so_does_a_rejected_token_that_stays(
    checkpoint: Path, expected: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = StatesPlanner.completed

    def right(self: StatesPlanner, record: InFlight, seconds: float) -> None:
        for row, aside in self._aside.items():
            self._aside[row] = aside._replace(end=self._completions.num_done(row))
        completed(self, record, seconds)

    monkeypatch.setattr(StatesPlanner, "completed", right)
    assert serve(checkpoint, WAYS["with proposed tokens"]).digests != expected.digests
