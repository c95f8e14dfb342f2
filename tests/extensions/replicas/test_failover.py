"""A stream whose replica is lost goes on at another one: to the client it is the stream of an undisturbed run."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import aiohttp
import pytest

from engine.config import Config
from server.extensions.replicas import replicas as replicas_module
from server.extensions.replicas.replicas import Replicas
from server.extensions.replicas.router import routing
from server.http.listener import bind
from server.proxy import passage
from server.proxy.replica import State
from tests.pace import far
from tests.server.engine_server import EngineServer

PROMPT = "def add(a, b):\n    "
CHAT = [{"role": "user", "content": "Write a function that adds."}]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
TOOLS = [{"type": "function", "function": TOOL}]
COMPLETIONS, CHATS, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
OLLAMA = "/api/generate"
TOKENS = {"max_tokens": 24, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": (COMPLETIONS, {"prompt": [PROMPT, "class A:"], "n": 2, "logprobs": 1, **TOKENS, **USAGE}),
    "stop strings": (COMPLETIONS, {"prompt": PROMPT, "stop": ["n", "(s"], "n": 4, "echo": True, "max_tokens": 24}),
    "penalties": (
        COMPLETIONS,
        {"prompt": PROMPT, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 20, **TOKENS},
    ),
    "grammar": (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {"regex": "[a-z]{30}[0-9]{5}"}, **USAGE}),
    "chat": (CHATS, {"messages": CHAT, "logprobs": True, **TOKENS, **USAGE}),
    "calls": (
        CHATS,
        {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
    ),
    "native": (NATIVE, {"text": PROMPT, "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 24}),
    "responses": ("/v1/responses", {"input": "Write a function that adds.", "max_output_tokens": 24}),
}  # fmt: skip


class Scissors:
    """Cuts one connection in the middle of an event.  num_events: that have passed; at: the one to cut, 0 for none."""

    def __init__(self) -> None:
        self.num_events = 0
        self.at = 0

    def cut(self, chunk: bytes) -> bytes | None:
        """The part of a chunk that comes before the cut; None if there is none in it."""
        for found in re.finditer(rb"data: |\{\"model\"", chunk):
            self.num_events += 1
            if self.num_events == self.at:
                self.at = 0
                return chunk[: found.end() + 5]
        return None


class Wire:
    """In front of a server."""

    def __init__(self, port: int, scissors: Scissors) -> None:
        self._port = port
        self._scissors = scissors
        self._open: list[asyncio.StreamWriter] = []
        self._num_relays = 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_relays += 1
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._open += [writer, to_server]

        async def up() -> None:
            while chunk := await reader.read(1 << 16):
                to_server.write(chunk)
            to_server.close()

        upwards = asyncio.create_task(up())
        with suppress(ConnectionError):
            while chunk := await from_server.read(1 << 16):
                before = self._scissors.cut(chunk)
                writer.write(chunk if before is None else before)
                if before is not None:
                    await writer.drain()
                    await asyncio.sleep(0.01)
                    break
        upwards.cancel()
        to_server.transport.abort()
        writer.transport.abort()
        self._num_relays -= 1

    async def close(self) -> None:
        """Let the relays end."""
        while self._num_relays:
            for writer in self._open:
                writer.transport.abort()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)


class WiredFleet:
    """See ``Fleet``."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, ports: list[int]) -> None:
        self.size = len(ports)
        self._ports = ports

    async def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._ports[number]}"

    async def stop(self, number: int) -> None:
        """They stop with the test."""

    async def start(self, number: int) -> None:
        """They run."""

    def close(self) -> None:
        """They stop with the test."""


class Routed:
    """An engine behind two wires, as two replicas of a router."""

    def __init__(self, url: str, scissors: Scissors, replicas: Replicas) -> None:
        self.replicas = replicas
        self.scissors = scissors
        self._url = url

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events, without "[DONE]"."""
        async with asyncio.timeout(far(20)):
            while not all(one.state is State.READY for one in self.replicas.all):
                await asyncio.sleep(0.002)
        model = {} if path == NATIVE else {"model": "demo"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(self._url + path, json={**model, "stream": True, **body}) as response,
        ):
            text = await response.text()
            assert response.status == 200, text
        if path == OLLAMA:
            return [json.loads(line) for line in text.splitlines()]
        blocks = [block.rpartition("data: ")[2] for block in text.split("\n\n") if block]
        assert not any(block.startswith(":") for block in text.split("\n\n")), "a mark has reached the client"
        return [json.loads(block, parse_float=rounded) for block in blocks if block != "[DONE]"]

    async def cut_stream(self, path: str, body: dict[str, Any], after: int) -> list[dict[str, Any]]:
        """The same with the replica lost after so many events; earlier if there were fewer.

        A reader that lags gets several tokens in one event, so a stream has not always the same number of events.
        """
        while after:
            self.scissors.at = self.scissors.num_events + after + 1
            events = await self.stream(path, body)
            if not self.scissors.at:
                return events
            after //= 2
        raise AssertionError("nothing was cut")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineServer]:
    """Behind both wires: what a replica knows of a request ends with its connection."""
    with EngineServer(model={"name": "demo"}, kv={"num_pages": 256}) as server:
        yield server


@pytest.fixture(autouse=True)
def _same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(passage, "new_seed", lambda: 7)


@asynccontextmanager
async def routed(engine: EngineServer) -> AsyncIterator[Routed]:
    scissors = Scissors()
    wires = [Wire(engine.port, scissors) for _ in range(2)]
    servers = [await asyncio.start_server(wire.relay, "127.0.0.1", 0) for wire in wires]
    fleet = WiredFleet([server.sockets[0].getsockname()[1] for server in servers])
    with bind("127.0.0.1", 0) as listener:
        async with routing(Config(), fleet, listener) as replicas:
            yield Routed(f"http://127.0.0.1:{listener.getsockname()[1]}", scissors, replicas)
    for server, wire in zip(servers, wires, strict=True):
        server.close()
        await wire.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_is_cut_says_what_an_undisturbed_one_says(kind: str, engine: EngineServer) -> None:
    path, body = KINDS[kind]
    async with routed(engine) as router:
        whole = await router.stream(path, body)
        for after in sorted({1, len(whole) // 2, len(whole) * 3 // 4} - {0}):
            events = await router.cut_stream(path, body, after)
            assert said(path, events) == said(path, whole), f"cut after {after} of {len(whole)} events"


async def test_lines_pass_as_they_come_and_end_with_their_replica(engine: EngineServer) -> None:
    body = {"prompt": PROMPT, "raw": True, "options": {"num_predict": 24, "temperature": 0}}
    async with routed(engine) as router:
        whole = await router.stream(OLLAMA, body)
        assert len(whole) > 2
        assert (whole[-1]["done"], whole[-1]["eval_count"]) == (True, 24)
        *_, last = await router.cut_stream(OLLAMA, body, 2)
        assert set(last) == {"error"}


def said(path: str, events: list[dict[str, Any]]) -> Any:
    """What a stream says however it is cut into events."""
    names = {event["id"] for event in events if "id" in event} | {
        event["meta_info"]["id"] for event in events if "meta_info" in event
    }
    assert len(names) <= 1, "the answer has changed its name"
    if path == NATIVE:
        return {**events[-1], "meta_info": {**events[-1]["meta_info"], "id": "", "cached_tokens": 0}}
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        (item,) = events[-1]["response"]["output"]
        assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == item["content"][0]["text"]
        return [event["type"] for event in events if "delta" not in event["type"]], text
    if path == "/v1/messages":
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        return text, [{**event, "message": 0, "usage": 0} for event in events if event["type"] != "content_block_delta"]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            _add(choices.setdefault(choice["index"], {}), choice)
    counts = [event.get("usage") and {**event["usage"], "prompt_tokens_details": 0} for event in events[-1:]]
    return choices, counts


def rounded(number: str) -> float:
    """Log probabilities differ in the last digits where other rows are computed beside them."""
    return round(float(number), 3)


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if key == "id":
            value = "an id"
        if isinstance(value, dict):
            _add(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            for call in value:
                _add(whole.setdefault(key, {}).setdefault(call["index"], {}), call)
        elif isinstance(value, str | list) and key not in ("type", "finish_reason"):
            whole[key] = whole.get(key, type(value)()) + value
        elif value is not None:
            whole[key] = value


async def test_logprobs_that_are_told_again_at_the_end_are_lost_with_their_replica(engine: EngineServer) -> None:
    body = {**KINDS["responses"][1], "include": ["message.output_text.logprobs"]}
    async with routed(engine) as router:
        events = await router.cut_stream("/v1/responses", body, 8)
        assert events[-1]["error"]["code"] == "replica_lost"


async def test_streams_move_when_their_replica_shuts_down_before_they_end(engine: EngineServer) -> None:
    async with routed(engine) as router:
        path, body = COMPLETIONS, {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        whole = await router.stream(path, body)
        before = router.scissors.num_events
        asked = [asyncio.create_task(router.stream(path, body)) for _ in range(4)]
        async with asyncio.timeout(far(20)):
            while router.scissors.num_events < before + 8:
                await asyncio.sleep(0.002)
        engine.call(engine.system.ingress.abort_all)
        assert all(said(path, events) == said(path, whole) for events in await asyncio.gather(*asked))
