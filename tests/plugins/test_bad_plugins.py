"""Plugins that raise, sleep or answer nonsense, in every hook: they are named, and nobody else notices."""

import logging
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.control.system import System
from engine.kv.eviction import EvictionListener, EvictionStrategy
from engine.messages import Finish
from engine.plugins.guards import GuardedRank, GuardedStrategy
from engine.types.errors import PluginError, RequestError
from engine.types.params import Grammar, SamplingParams
from tests.figures import Figure
from tests.models.checkpoints import build, random_tokens, save
from tests.plugins.conftest import Install
from tests.workers.server import ROOT

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HEAD = 'import time\nfrom engine.plugins.hookspecs import hookimpl\n\nCALLBOARD_PLUGIN = {"api": 1}\n'
# Kind -> the hook that builds one of it.
HOOKS = {
    "attention": "callboard_attention_backend",
    "comm": "callboard_comm",
    "eviction": "callboard_eviction_strategy",
    "grammar": "callboard_grammar_engine",
    "observer": "callboard_observer",
    "policy": "callboard_scheduling_policy",
}
RANKED = """
class Odd:
    looks_at_cache = False
    calls = 0

    def rank(self, one):
        Odd.calls += 1
        if Odd.calls > 2:
            {body}
        return (Odd.calls,)

@hookimpl
def {hook}(context):
    return Odd()
"""
GRAMMAR = """
class Odd:
    num_bytes = 1

    def compile(self, grammar):
        {compile}
        return self

    def matcher(self):
        {matcher}
        return self

    def consume(self, token_id):
        {consume}

    def fill(self, mask):
        mask[:] = -1
        {fill}

@hookimpl
def callboard_grammar_engine(context):
    {build}
    return Odd()
"""
OBSERVER = """
@hookimpl
def callboard_request_finished(requests):
    {body}

@hookimpl
def callboard_kv_event(events):
    {body}

@hookimpl
def callboard_engine_stopped():
    {body}
"""
ATTENTION = """
from engine.plugins.attention import torch as reference

class Odd:
    def __init__(self, backend):
        self.backend, self.attend, self.steps = backend, backend.attend, 0

    def plan_step(self, batch):
        self.steps += 1
        if self.steps == 30:  # the trial before the start has fewer
            raise ValueError("planted")
        self.backend.plan_step(batch)

@hookimpl
def callboard_attention_backend(context):
    factory = reference.callboard_attention_backend(context)
    return lambda spec, pool: Odd(factory(spec, pool))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


async def play(
    checkpoint: Path, scenario: Callable[[System], Coroutine[Any, Any, None]], model: dict[str, str], **plugins: object
) -> None:
    """A scenario on an engine with some plugins."""
    tables = {
        "model": {"path": str(checkpoint), "tokenizer": "none", **model},
        "kv": {"num_pages": 16, "page_size": 16},
        "plugins": plugins,
    }
    system = System(build_config(Config(), tables))
    try:
        await system.start()
        await scenario(system)
        assert system.died is None
    finally:
        await system.stop(drain_timeout_s=1)


async def serves(system: System) -> None:
    """More than fits at once, so that requests wait and pages are evicted; all end as they would have."""
    streams = [system.ingress.open(random_tokens(40, seed), GREEDY) for seed in range(8)]
    for stream in streams:
        assert (await stream.collect()).finish == Finish.LENGTH


def chosen(kind: str) -> dict[str, object]:
    return {"observers": ["odd"]} if kind == "observer" else {kind: "odd"}


@pytest.mark.reliability("P13", "a plugin raises, or builds the wrong thing, in each constructor hook")
@pytest.mark.parametrize("body", ["raise ValueError('planted')", "return 42"], ids=["raises", "the wrong type"])
@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind != "grammar"])
async def test_what_cannot_be_built_is_an_error_of_the_start_that_names_the_plugin(
    checkpoint: Path, install: Install, kind: str, body: str
) -> None:
    source = f"{HEAD}@hookimpl\ndef {HOOKS[kind]}(context):\n    {body}\n"
    install("acme", {f"{kind}.odd": "odd"}, {"odd.py": source})
    with pytest.raises(PluginError, match=rf"{kind}\.odd.*(planted|42|observes nothing)") as refused:
        await play(checkpoint, serves, {}, **chosen(kind))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("num_tokens", ["'four'", "0", "65", "True"])
async def test_a_proposer_that_wants_no_number_of_tokens_is_refused_at_the_start(
    checkpoint: Path, install: Install, num_tokens: str
) -> None:
    body = f"class Odd:\n    num_tokens = {num_tokens}\n\n    def open(self):\n        return self\n\n"
    source = f"{HEAD}{body}@hookimpl\ndef callboard_proposer(context):\n    return Odd()\n"
    install("acme", {"proposer.odd": "odd"}, {"odd.py": source})
    with pytest.raises(PluginError, match=r"proposer\.odd: num_tokens is .* from 1 to 64"):
        await play(checkpoint, serves, {}, proposer="odd")


@pytest.mark.reliability("P13", "a strategy or policy raises, or ranks by nonsense, in the middle")
@pytest.mark.parametrize("body", ["raise ValueError('planted')", "return 'abc'", "return (1, 2)", "return (1.5,)"])
@pytest.mark.parametrize("kind", ["eviction", "policy"])
async def test_what_can_no_longer_rank_is_named_and_everybody_is_served(
    checkpoint: Path, install: Install, kind: str, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", {f"{kind}.odd": "odd"}, {"odd.py": HEAD + RANKED.format(hook=HOOKS[kind], body=body)})
    await play(checkpoint, serves, {}, **chosen(kind))
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage().startswith(f"plugin {kind}.odd failed to rank")


SHARED = """
class Odd:
    looks_at_cache = False
    def rank(self, waiting): return ()
    def turn(self, tenant): {turn}
    def returned(self, tenant, lowest): {returned}
    def served(self, tenant, num_prompt_tokens, num_output_tokens): {served}

@hookimpl
def callboard_scheduling_policy(context): return Odd()
"""


@pytest.mark.reliability("P13", "a policy of tenants raises, or returns nonsense, at each of its calls")
@pytest.mark.parametrize(
    "broken", [{"turn": "raise ValueError"}, {"turn": "return 'x'"}, {"returned": "1 / 0"}, {"served": "1 / 0"}]
)
async def test_who_can_no_longer_share_turns_is_named_and_everybody_is_served(
    checkpoint: Path, install: Install, broken: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    bodies = {"turn": "return 0", "returned": "pass", "served": "pass"} | broken
    install("acme", {"policy.odd": "odd"}, {"odd.py": HEAD + SHARED.format(**bodies)})
    await play(checkpoint, serves, {}, policy="odd")
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage().startswith("plugin policy.odd failed to share turns")


@pytest.mark.reliability("P13", "a grammar plugin raises, or returns the wrong type, at each of its calls")
@pytest.mark.parametrize("place", ["build", "compile", "matcher", "consume", "fill"])
@pytest.mark.parametrize("body", ["raise ValueError('planted')", "return 42"], ids=["raises", "the wrong type"])
async def test_a_grammar_that_breaks_ends_its_own_request(
    checkpoint: Path, install: Install, place: str, body: str, caplog: pytest.LogCaptureFixture, figure: Figure
) -> None:
    if body == "return 42" and place in ("consume", "fill"):
        pytest.skip("nobody looks at what these return")
    bodies = {name: body if name == place else "pass" for name in ("build", "compile", "matcher", "consume", "fill")}
    install("acme", {"grammar.odd": "odd"}, {"odd.py": HEAD + GRAMMAR.format(**bodies)})

    async def scenario(system: System) -> None:
        others = [system.ingress.open(random_tokens(40, seed), GREEDY) for seed in range(2)]
        broken = system.ingress.open(random_tokens(9, 7), GREEDY.replace(grammar=Grammar("regex", "a+")))
        began = time.monotonic()
        with pytest.raises(RequestError, match=r"log has the details|cannot go on") as refused:
            await broken.collect()
        figure("the request's own error", time.monotonic() - began, "s", at_most=5, patience=5)
        assert refused.value.code == ("internal_error" if place in ("build", "compile") else "grammar_failed")
        assert "planted" not in str(refused.value)
        for other in others:
            assert (await other.collect()).finish == Finish.LENGTH
        assert system.executors.num_restarts == 0

    demo = str(ROOT / "examples" / "demo_model")
    await play(checkpoint, scenario, {"path": demo, "tokenizer": ""}, **chosen("grammar"))
    assert "grammar.odd" in caplog.text


@pytest.mark.reliability("P13", "an observer raises, or returns something, in each of its hooks")
@pytest.mark.parametrize("body", ["raise ValueError('planted')", "return 42"], ids=["raises", "returns something"])
async def test_an_observer_that_breaks_is_named_and_requests_end_as_ever(
    checkpoint: Path, install: Install, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", {"observer.odd": "odd"}, {"odd.py": HEAD + OBSERVER.format(body=body)})
    await play(checkpoint, serves, {}, **chosen("observer"))
    named = [record for record in caplog.records if record.getMessage().startswith("plugin observer.odd raised in")]
    assert len(named) == (2 if "raise" in body else 0)  # once while requests run, once more at the end


@pytest.mark.reliability("P13", "an attention backend raises in a step")
async def test_a_backend_that_raises_in_a_step_costs_a_restart_and_is_named(
    checkpoint: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", {"attention.odd": "odd"}, {"odd.py": HEAD + ATTENTION})

    async def scenario(system: System) -> None:
        stream = system.ingress.open(random_tokens(9, 0), GREEDY.replace(max_tokens=100))
        assert (await stream.collect()).finish == Finish.LENGTH
        assert system.executors.num_restarts == 3  # each time it got 30 steps further

    await play(checkpoint, scenario, {}, **chosen("attention"))
    assert caplog.text.count("executor0 crashed: PluginError: plugin attention.odd (acme 1.0) raised in plan_step") == 3


@pytest.mark.reliability("P13", "an observer or policy sleeps for 5 s on the engine's loop")
@pytest.mark.parametrize("kind", ["observer", "policy"])
async def test_one_that_sleeps_is_named_and_nothing_is_lost(
    checkpoint: Path, install: Install, kind: str, caplog: pytest.LogCaptureFixture, figure: Figure
) -> None:
    source = RANKED.format(hook=HOOKS["policy"], body="time.sleep(5) if Odd.calls == 3 else None")
    if kind == "observer":
        source = (
            "@hookimpl\ndef callboard_request_finished(requests):\n    requests[0].request_id == 1 and time.sleep(5)\n"
        )
    install("acme", {f"{kind}.odd": "odd"}, {"odd.py": HEAD + source})
    began = time.monotonic()
    await play(checkpoint, serves, {}, **chosen(kind))
    figure("all requests served", time.monotonic() - began, "s", at_most=15, patience=3)
    named = re.search(rf"plugin {kind}\.odd took ([0-9.]+)", caplog.text)
    assert named is not None
    assert float(named[1].rstrip(".")) >= 5


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(9)])
def test_a_guarded_rank_puts_what_it_cannot_rank_behind_everything(error: BaseException) -> None:
    class Strategy:
        def rank(self, number: int) -> tuple[int, ...]:
            if number == 3:
                raise error
            return (number,)

    guarded = GuardedStrategy("eviction.odd", Strategy())
    assert isinstance(guarded, EvictionStrategy)
    assert [guarded.rank(number) for number in (5, 9, 3, 1)] == [(5,), (9,), (9,), (9,)]
    assert GuardedRank("policy.odd", lambda _: "abc")(1) == (0,)
    assert not isinstance(guarded, EvictionListener), "nobody pays for what it does not listen to"


def test_a_guarded_listener_that_raises_is_told_nothing_any_more() -> None:
    heard = []

    class Strategy:
        def rank(self, number: int) -> tuple[int, ...]:
            return (number,)

        def evicted(self, number: int) -> None:
            heard.append(number)
            if number == 2:
                raise SystemExit(9)

    guarded = GuardedStrategy("eviction.odd", Strategy())
    assert isinstance(guarded, EvictionListener)
    for number in (1, 2, 3):
        guarded.evicted(number)
    assert heard == [1, 2]
