"""Tokenizer processes: they say what one in this process says, and one that is lost takes its own requests alone."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.actors.ingress import Prompt
from engine.config import Config, build_config
from engine.control.system import System
from engine.host.logs import JSONFormatter
from engine.messages import Delta, Finish, RequestOptions
from engine.text.codec import TextCodec
from engine.types.errors import EngineDied, RequestError, WeightsError
from engine.types.params import Grammar, SamplingParams
from engine.types.prompt import ChatOptions, ChatTurn, ToolCall
from engine.workers.tokenizers import TokenizerPool
from tests.pace import far
from tests.workers.executors import alive, children
from tests.workers.quick_server import QuickSystem

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PARTS = set(TextCodec.load(DEMO).encode("é你🙂").tolist())  # their bytes make characters, and halves of some
WILD = SamplingParams(temperature=10.0, max_tokens=60, seed=5, logit_bias=dict.fromkeys(PARTS, 100.0))
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
)
TURNS = (
    ChatTurn("user", "What is in “été.txt”? 🙂"),
    ChatTurn("assistant", "", tool_calls=(ToolCall("call_1", "look", '{"name": "été.txt"}'),)),
    ChatTurn("tool", "nothing", tool_call_id="call_1"),
)
PLAIN = RequestOptions()
CASES: dict[str, tuple[Prompt, SamplingParams, RequestOptions]] = {
    "greedy": ("def add(a, b):", GREEDY, PLAIN),
    "stop string": (
        (ChatTurn("user", "What is a page?"),),
        GREEDY.replace(stop=("the KV cache", "\n\n"), max_tokens=60),
        PLAIN,
    ),
    "stop string kept": ("class", GREEDY.replace(stop=(":",), include_stop_str_in_output=True), PLAIN),
    "multi-byte": ("你好，世界 🐈‍⬛ naïve", WILD, PLAIN),
    "multi-byte tokens": ("é", WILD.replace(seed=6, logprobs=3), PLAIN),
    "echo": ("# ünïcode 🙂\n", GREEDY.replace(logprobs=2, prompt_logprobs=2), RequestOptions(echo=True)),
    "prompt ids": ("import os", GREEDY, RequestOptions(return_prompt_ids=True)),
    "token ids": ([5, 6, 7, 8], GREEDY, PLAIN),
    "prompt only": (
        "a prompt that is measured",
        GREEDY.replace(max_tokens=1, pooling="mean", whole_prompt=True),
        RequestOptions(prompt_only=True),
    ),
    "chat": (TURNS[:1], GREEDY, PLAIN),
    "chat with tools": (TURNS, GREEDY, RequestOptions(chat=ChatOptions(tools=TOOLS))),
    "json": ("{", GREEDY.replace(grammar=Grammar("json_schema", '{"type": "object"}'), max_tokens=12), PLAIN),
    "choice": ("x", GREEDY.replace(grammar=Grammar("choice", '["yes", "nö"]')), PLAIN),
}
REFUSALS: dict[str, tuple[Prompt, SamplingParams, RequestOptions]] = {
    "empty": ("", GREEDY, PLAIN),
    "wrong schema": ("x", GREEDY.replace(grammar=Grammar("json_schema", '{"type": "nonsense"}')), PLAIN),
    "too long": ("word " * 600, GREEDY.replace(max_tokens=2000), PLAIN),
}


def configured(executor: str = "inline", **placement: Any) -> Config:
    return build_config(Config(), {"kv": {"num_pages": 1024}, "placement": {"executor": executor, **placement}})


@asynccontextmanager
async def running(config: Config, kind: type[System] = System) -> AsyncIterator[System]:
    """A system, of which nothing is left at its end."""
    system = kind(config)
    await system.start()
    try:
        async with asyncio.timeout(far(60)):
            yield system
    finally:
        await system.stop()
    assert len(asyncio.all_tasks()) == 1
    assert not children(role="tokenizer")
    assert not children()


def pool_of(system: System) -> TokenizerPool:
    assert isinstance(system.tokenizer, TokenizerPool)
    return system.tokenizer


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def nothing_used(system: System) -> None:
    """No page has an owner."""
    await until(lambda: system.ingress.stats is not None and not system.ingress.stats.pages_used)


async def answers(system: System) -> dict[str, Delta]:
    """Every case; one at a time, since the last digits of a logarithm depend on what else is in the batch."""
    return {
        name: await system.ingress.open(prompt, params, options).collect()
        for name, (prompt, params, options) in CASES.items()
    }


async def refusals(system: System) -> dict[str, tuple[Any, ...]]:
    said = {}
    for name, (prompt, params, options) in REFUSALS.items():
        with pytest.raises(RequestError) as refused:
            await system.ingress.open(prompt, params, options).collect()
        said[name] = (refused.value.message, refused.value.status, refused.value.code, refused.value.param)
    return said


def plain(deltas: dict[str, Delta]) -> dict[str, Delta]:
    """Without the engine's own numbers."""
    return {name: msgspec.structs.replace(delta, request_id=0) for name, delta in deltas.items()}


@pytest.mark.parametrize(("executor", "tokenizers"), [("inline", 1), ("inline", 3), ("process", 2)])
async def test_a_pool_says_what_a_tokenizer_in_this_process_says(executor: str, tokenizers: int) -> None:
    heard: list[Any] = []
    for config in (configured(), configured(executor, tokenizers=tokenizers)):
        async with running(config) as system:
            heard.append((plain(await answers(system)), await refusals(system)))
            await nothing_used(system)
    (expected, refused), (got, refused_too) = heard
    assert got == expected
    assert refused_too == refused
    assert expected["stop string"].stop_reason == "the KV cache"
    assert "\ufffd" in expected["multi-byte tokens"].text
    assert "é" in expected["multi-byte tokens"].text
    assert expected["choice"].text in ("yes", "nö")


@pytest.mark.parametrize("link", ["unix", "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
async def test_a_stream_comes_in_pieces_that_make_up_the_whole(link: str) -> None:
    async with running(configured(tokenizers=2, link=link)) as system:
        prompt, params, _ = CASES["multi-byte tokens"]
        pieces = [delta.text async for delta in system.ingress.open(prompt, params)]
        whole = await system.ingress.open(prompt, params).collect()
        assert "".join(pieces) == whole.text
        assert len(pieces) > 10


@pytest.mark.parametrize(
    ("prompt", "params"), [("\ud83d", GREEDY), ("x", GREEDY.replace(stop=("\ud83d",)))], ids=["prompt", "stop"]
)
async def test_half_a_character_is_refused_and_the_engine_goes_on(prompt: str, params: SamplingParams) -> None:
    async with running(configured(tokenizers=1)) as system:
        with pytest.raises(RequestError, match="Unicode") as refused:
            await system.ingress.open(prompt, params).collect()
        assert refused.value.status == 400
        assert (await system.ingress.open("x", GREEDY).collect()).finish


PROMPTS = [f"def function_{index}(value):\n    " for index in range(32)]
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


async def run_all(system: System, during: Callable[[], Coroutine[Any, Any, None]] | None = None) -> list[Any]:
    """32 streams; what each came to, its last delta or its error."""
    streams = [system.ingress.open(prompt, LONG) for prompt in PROMPTS]
    ends = asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True)
    if during is not None:
        async with asyncio.timeout(far(20)):
            while not all(stream.has_output for stream in streams):
                await asyncio.sleep(0.002)
        await during()
    async with asyncio.timeout(far(20)):
        return list(await ends)


def texts(ends: list[Any]) -> list[str | None]:
    return [end.text if isinstance(end, Delta) else None for end in ends]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("tokenizers", [1, 2])
async def test_a_lost_process_costs_its_own_streams_an_error_and_comes_back(
    number: signal.Signals, tokenizers: int
) -> None:
    # A process that is starved for so long by other tests would be lost as well.
    config = configured(tokenizers=tokenizers, silence_timeout_s=3.0, max_restarts=5)
    async with running(config, QuickSystem) as system:
        pool, ingress = pool_of(system), system.ingress
        expected = texts(await run_all(system))
        assert None not in expected
        victims = []

        async def strike() -> None:
            victims.append(children(role="tokenizer")[0])
            os.kill(victims[0], number)
            await until(lambda: pool.num_restarts > 0)
            assert ingress.recovering == (tokenizers == 1)

        ends = await run_all(system, strike)
        errors = [end for end in ends if not isinstance(end, Delta)]
        assert 1 <= len(errors) <= 32 // tokenizers, "only its own, and those of them that still ran"
        assert {(error.status, error.code) for error in errors} == {(503, "tokenizer_lost")}
        survivors = [(got, want) for got, want in zip(texts(ends), expected, strict=True) if got is not None]
        assert all(got == want for got, want in survivors)
        late = ingress.open(PROMPTS[0], LONG)
        await until(lambda: pool.num_ready == tokenizers)
        assert not ingress.recovering
        assert not alive(victims[0])
        assert (await late.collect()).text == expected[0]
        assert texts(await run_all(system)) == expected
        await nothing_used(system)


async def test_what_kills_every_tokenizer_ends_the_engine_with_one_clear_reason() -> None:
    async with running(configured(tokenizers=1, max_restarts=1)) as system:
        pool = pool_of(system)
        streams = [system.ingress.open(prompt, LONG.replace(max_tokens=1000)) for prompt in PROMPTS[:4]]
        for _ in range(2):
            await until(lambda: pool.num_ready == 1)
            restarts = pool.num_restarts
            os.kill(children(role="tokenizer")[0], signal.SIGKILL)
            await until(lambda: pool.num_restarts > restarts or system.died is not None)  # noqa: B023
        with pytest.raises(EngineDied, match="tokenizer0 was killed by SIGKILL; 1 restarts in 300 s did not help"):
            await system.wait()
        for stream in streams:
            with pytest.raises((RequestError, EngineDied)):
                await stream.collect()


async def test_stopping_while_a_tokenizer_comes_back_ends_what_is_open() -> None:
    async with running(configured(tokenizers=1)) as system:
        pool = pool_of(system)
        os.kill(children(role="tokenizer")[0], signal.SIGKILL)
        await until(lambda: pool.num_ready == 0)
        waiting = system.ingress.open(PROMPTS[0], GREEDY)
        await system.stop()
        with pytest.raises(RequestError, match="shutting down"):
            await waiting.collect()


async def test_draining_lets_streams_finish() -> None:
    async with running(configured(tokenizers=2)) as system:
        streams = [system.ingress.open(prompt, LONG) for prompt in PROMPTS]
        stopping = asyncio.ensure_future(system.stop(drain_timeout_s=far(30)))
        for stream in streams:
            assert (await stream.collect()).finish == Finish.LENGTH
        await stopping


async def test_a_tokenizer_that_cannot_be_read_is_the_starts_own_error(tmp_path: Path) -> None:
    """The process fails: this one could still read it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    config = build_config(configured(tokenizers=1), {"model": {"tokenizer": str(tmp_path)}})
    system = System(config)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        await system.start()
    await system.stop()
    assert not children(role="tokenizer")


async def test_processes_log_as_the_engine_does(capfd: pytest.CaptureFixture[str]) -> None:
    """The lines are JSON, with the process's name."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        async with running(configured("process", tokenizers=1)) as system:
            await system.ingress.open("x", GREEDY).collect()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert {"executor0", "tokenizer0"} <= {line.get("process") for line in lines}
