"""Another model, a proposer, and executors in processes of their own take over under live streams."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.actors.stream import Stream
from engine.config import Config, build_config
from engine.control.changeover import Changeover, Road
from engine.control.system import System
from engine.features.lora.files import AdapterRules, read_adapter
from engine.features.speculation.payoff import Payoff
from engine.messages import Finish, RequestOptions
from engine.plugins.proposer.ngram import NgramProposer
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from server.extensions.chaos.sim.liars import Everything, Liar, LiarSession
from tests.engine.held_steps import hold_steps
from tests.features.lora.made import greedy, make_adapter, merged
from tests.models.checkpoints import VOCAB, build, configuration, random_tokens, reference_logits, save
from tests.pace import far

MOST = 64
HALF = 240  # tokens of the streams that outlast other executors' load
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((3, 20, 11, 16, 9, 23))]
TIE = 1e-3  # of logits: either token is right
NGRAM = {"proposer": "ngram"}


class Models:
    """References and their checkpoints: 'other' has the shape of 'first', 'wider' another one.

    One adapter, which fits the first two."""

    def __init__(self, root: Path) -> None:
        wider = configuration("llama")
        wider.intermediate_size, wider.num_hidden_layers = 2 * wider.intermediate_size, wider.num_hidden_layers + 1
        self.of: dict[str, PreTrainedModel] = {"first": build("llama"), "other": build("llama")}
        self.of["wider"] = type(self.of["first"])(wider).eval()
        with torch.no_grad():
            for weight in self.of["other"].parameters():
                weight.add_(torch.randn_like(weight), alpha=0.2)
        self.paths = {name: save(model, root / name) for name, model in self.of.items()}
        self.adapters = root / "adapters"
        self.adapter = make_adapter(self.adapters / "one", self.of["first"], 1)

    def config(self, model: str, **tables: dict[str, Any]) -> Config:
        config = {
            "model": {"path": str(self.paths[model]), "tokenizer": "none"},
            "device": {"kind": "cpu", "threads": 1, "seed": 1},
            "kv": {"num_pages": 256},
            "plugins": {"attention": "torch", "linear": "torch"},
        }
        return build_config(build_config(Config(), config), tables)

    def right(self, model: str, prompt: list[int], tokens: list[int], *, adapted: bool) -> list[bool]:
        """Of each token, whether the model says it."""
        reference = merged(self.of[model], self.adapter) if adapted else self.of[model]
        logits = reference_logits(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        said = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        return (said >= logits.max(dim=1).values - TIE).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, executors of this process are held before their next step."""
    return hold_steps(monkeypatch)


@pytest.fixture
def proposes(monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    """In the place of ``ngram``: what the first model says, which is right until it is another model."""
    texts = [[*prompt, *greedy(models.of["first"], prompt, MOST)] for prompt in PROMPTS]

    def next_token(tokens: Sequence[int]) -> int:
        at = len(tokens)
        return next((text[at] for text in texts if len(text) > at and text[:at] == list(tokens)), 0)

    liar = Liar("right", next_token, VOCAB)
    monkeypatch.setattr(NgramProposer, "open", lambda self: LiarSession(liar))
    monkeypatch.setattr(Payoff, "knows", Everything.knows)
    monkeypatch.setattr(Payoff, "counts", Everything.counts)


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[System, Changeover]]:
    system = System(config)
    await system.start()
    try:
        async with asyncio.timeout(far(60)):
            yield system, Changeover(system)
    finally:
        await system.stop()
    assert system.died is None


def num_proposed_of(system: System) -> int:
    meter = system.monitor.meter
    assert meter is not None
    return sum(meter.proposed_at)


async def all_decode(system: System, streams: list[Stream]) -> list[list[int]]:
    """The first token of each."""
    return [tokens_of((await stream.next()).token_ids) for stream in streams]


def tokens_of(column: bytes) -> list[int]:
    return np.frombuffer(column, dtype=np.int32).tolist()


async def rest(streams: list[Stream], before: list[list[int]]) -> list[list[int]]:
    deltas = await asyncio.gather(*(stream.collect() for stream in streams))
    assert {delta.finish for delta in deltas} == {Finish.LENGTH}
    return [[*tokens, *tokens_of(delta.token_ids)] for tokens, delta in zip(before, deltas, strict=True)]


@pytest.mark.slow
@pytest.mark.usefixtures("proposes")
@pytest.mark.parametrize(("name", "adapted"), [("other", True), ("other", False), ("wider", False)])
async def test_another_model_says_the_rest_of_every_stream(
    models: Models, go: threading.Event, name: str, adapted: bool
) -> None:
    """With speculation, and half of the streams through an adapter where the new model takes it."""
    tables: dict[str, dict[str, Any]] = {"plugins": NGRAM}
    if adapted:
        tables["lora"] = {"folder": str(models.adapters), "max_adapters": 2, "max_rank": 4}

    async with running(models.config("first", **tables)) as (system, changeover):
        facts = system.engine.facts.get("lora")
        rules = msgspec.msgpack.decode(facts, type=AdapterRules) if facts is not None else None
        adapter = read_adapter(models.adapter, rules) if rules is not None else None
        parts = adapter.parts if adapter is not None else {}
        uses = [adapter is not None and number % 2 == 0 for number in range(len(PROMPTS))]
        streams = [
            system.ingress.open(prompt, GREEDY, RequestOptions(parts=parts if use else {}))
            for prompt, use in zip(PROMPTS, uses, strict=True)
        ]
        began = await all_decode(system, streams)
        while not num_proposed_of(system):
            began[0] += tokens_of((await streams[0].next()).token_ids)
        go.clear()
        outcome = await changeover.apply(models.config(name, **tables))
        go.set()
        assert (outcome.applied, [one.key for one in outcome.changes]) == (True, ["model.path"])
        num_proposed = num_proposed_of(system)
        for prompt, use, tokens in zip(PROMPTS, uses, await rest(streams, began), strict=True):
            assert len(tokens) == MOST
            by_first = models.right("first", prompt, tokens, adapted=use)
            by_next = models.right(name, prompt, tokens, adapted=use)
            changed_at = by_first.index(False)
            assert changed_at > 0
            assert any(all(by_next[at:]) for at in range(1, changed_at + 1)), "neither model says these tokens"
        assert num_proposed_of(system) > num_proposed > 0, "nobody speculated"
        planner = system.scheduler.planner
        assert planner is not None
        planner.check()
        first = await system.ingress.open(PROMPTS[0], GREEDY).collect()
        assert all(models.right(name, PROMPTS[0], tokens_of(first.token_ids), adapted=False)), "what is new is its own"


async def test_a_model_that_adapters_do_not_fit_is_refused_and_costs_nothing(models: Models) -> None:
    tables = {"lora": {"folder": str(models.adapters), "max_adapters": 2, "max_rank": 4}}

    async with running(models.config("first", **tables)) as (system, changeover):
        streams = [system.ingress.open(prompt, GREEDY) for prompt in PROMPTS]
        began, slot = await all_decode(system, streams), system.executors.links[0].slot
        with pytest.raises(ConfigError, match=r"model\.path=.*other shapes than those that adapters are served for"):
            await changeover.apply(models.config("wider", **tables))
        assert system.executors.links[0].slot is slot
        for prompt, tokens in zip(PROMPTS, await rest(streams, began), strict=True):
            assert all(models.right("first", prompt, tokens, adapted=False))


@pytest.mark.slow
@pytest.mark.usefixtures("proposes")
async def test_speculation_begins_and_ends_under_streams(models: Models, go: threading.Event) -> None:
    async with running(models.config("first")) as (system, changeover):
        streams = [system.ingress.open(prompt, GREEDY) for prompt in PROMPTS]
        began = await all_decode(system, streams)
        assert num_proposed_of(system) == 0
        for proposer in ("ngram", "none"):
            go.clear()
            assert (await changeover.apply(models.config("first", plugins={"proposer": proposer}))).applied
            go.set()
            num_proposed = num_proposed_of(system)
            if proposer == "ngram":
                while num_proposed_of(system) == num_proposed:
                    began[0] += tokens_of((await streams[0].next()).token_ids)
        assert system.ingress.num_open == len(PROMPTS), "all was over before the last change"
        for prompt, tokens in zip(PROMPTS, await rest(streams, began), strict=True):
            assert len(tokens) == MOST
            assert all(models.right("first", prompt, tokens, adapted=False))
        assert num_proposed_of(system) == num_proposed > 0, "somebody still speculates"


@pytest.mark.slow
@pytest.mark.parametrize("road", ["beside", "after"])
async def test_executors_in_processes_of_their_own_are_replaced_and_sleep(
    models: Models, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    if road == "after":
        monkeypatch.setattr("engine.control.changeover.available_bytes", lambda: 0)
    places = {"placement": {"executor": "process"}}
    # Their steps cannot be slowed down from here: the streams are as long as that other executors load meanwhile.
    endless = SamplingParams(temperature=0.0, max_tokens=2 * HALF, ignore_eos=True)

    async with running(models.config("first", **places)) as (system, changeover):
        done = asyncio.Event()
        found: list[tuple[list[int], list[int]]] = []

        async def ask_on(prompt: list[int]) -> None:
            # Streams of one batch end in one step: the next one opens when half of this one is left.
            following: Stream | None = system.ingress.open(prompt, endless)
            while following is not None:
                stream, following = following, None
                tokens: list[int] = []
                finish = Finish.RUNNING
                while finish == Finish.RUNNING:
                    delta = await stream.next()
                    finish, tokens = delta.finish, tokens + tokens_of(delta.token_ids)
                    if following is None and len(tokens) >= HALF and not done.is_set():
                        following = system.ingress.open(prompt, endless)
                assert finish == Finish.LENGTH
                found.append((prompt, tokens))

        asking = [asyncio.create_task(ask_on(prompt)) for prompt in PROMPTS]
        outcome = await changeover.apply(models.config("first", kv={"page_size": 32, "num_pages": 200}, **places))
        assert (outcome.applied, outcome.road) == (True, road)
        for level in (1, 2):
            await changeover.sleep(level)
            await changeover.wake()
        with pytest.raises(ConfigError, match=r"kv\.num_pages=1"):
            await changeover.apply(models.config("first", kv={"page_size": 32, "num_pages": 1}, **places))
        done.set()
        await asyncio.gather(*asking)
        assert all(
            models.right("first", prompt, tokens, adapted=False) == [True] * 2 * HALF for prompt, tokens in found
        )
        planner = system.scheduler.planner
        assert planner is not None
        planner.check()
        assert (planner.requests.limits.page_size, planner.requests.limits.num_pages) == (32, 200)
        assert system.executors.num_restarts == 0
