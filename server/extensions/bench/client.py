"""One request to an OpenAI-compatible server, and what was seen of its stream.

Owns: bodies, events, what counts as the first token and as a failure.  Does not know: loads, statistics.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from engine.types.errors import ConfigError
from server.extensions.bench.loads import LoadTurn

MAX_ERROR_BYTES = 1 << 16
DONE = b"[DONE]"
SPOKEN = ("text", "content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # any of which is output


@dataclass(slots=True)
class Record:
    """The times of a request.  due_s, late_s: when it was to be sent, and how much later it was.

    ttft_s: from its sending to the first event with output; None if none came.  e2e_s: to its end.  gaps_s: between
    two events with output.  error: '' if it ended as it should."""

    due_s: float
    late_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Cut(Exception):
    """A stream that does not end as one should."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked.  base_url: with or without /v1.  fields: what each body says besides.

    reuses: whether a connection takes further requests, which a server may close just then."""

    base_url: str
    model: str = ""
    chat: bool = True
    api_key: str = ""
    timeout_s: float = 600.0
    fields: dict[str, Any] = field(default_factory=dict)
    reuses: bool = True

    @property
    def root(self) -> str:
        base = self.base_url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"


class Client:
    """A context manager.  Every request may have a connection of its own, so that none waits for another here."""

    def __init__(self, target: Target) -> None:
        self.target = target

    async def __aenter__(self) -> "Client":
        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not self.target.reuses),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s),
            headers=headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Returns the model that the server serves.  Raises ConfigError if it does not say so."""
        url = f"{self.target.root}/models"
        try:
            async with self._session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    raise ConfigError(f"{url} answers {response.status}: {_reason(body)}; is --key right?")
                return str(msgspec.json.decode(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(f"no server at {self.target.base_url}: {_named(error)}") from None
        except (msgspec.DecodeError, LookupError, TypeError):
            raise ConfigError(f"{url} lists no model; name one with --model") from None

    async def ask(self, said: list[dict[str, str]], turn: LoadTurn, record: Record) -> str:
        """Send a turn behind what was said before, fill in the record, and return the answer.

        Never raises for what the server or the network does: that is the record's error."""
        began = time.perf_counter()
        pieces: list[str] = []
        try:
            await self._stream(self._body(said, turn), began, record, pieces)
        except Cut as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no end within {self.target.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = _named(error)
        record.e2e_s = time.perf_counter() - began
        return "".join(pieces)

    def _body(self, said: list[dict[str, str]], turn: LoadTurn) -> bytes:
        asked: dict[str, Any] = {"model": self.target.model, "max_tokens": turn.max_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}, **self.target.fields}
        if self.target.chat:
            return msgspec.json.encode(asked | {"messages": [*said, {"role": "user", "content": turn.text}]})
        return msgspec.json.encode(asked | {"prompt": turn.text})

    async def _stream(self, body: bytes, began: float, record: Record, pieces: list[str]) -> None:
        url = f"{self.target.root}/{'chat/completions' if self.target.chat else 'completions'}"
        last, finished, num_events = began, False, 0
        async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise Cut(f"{response.status} {_reason(await response.content.read(MAX_ERROR_BYTES))}")
            async for data in _events(response.content):
                now = time.perf_counter()
                if data == DONE:
                    finished = True
                    break
                try:
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise Cut(f"in its stream: {_reason(data)}")
                    _read_usage(event.get("usage"), record)
                    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
                    piece = _piece(choice)
                except (msgspec.DecodeError, AttributeError, TypeError):
                    raise Cut("an event that is no JSON object of this API") from None
                finished |= choice.get("finish_reason") is not None
                if piece is None and not (record.ttft_s is None and finished):
                    continue
                num_events += 1
                pieces.append(piece or "")
                if record.ttft_s is None:
                    record.ttft_s = now - began
                else:
                    record.gaps_s.append(now - last)
                last = now
        if not finished:
            raise Cut("the stream ended before its end was said")
        record.output_tokens = record.output_tokens or num_events


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of every event; lines may be of any length, and arrive in pieces."""
    rest = b""
    lines: deque[bytes] = deque()
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        lines.extend(whole)
        while lines:
            line = lines.popleft()
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _piece(choice: dict[str, Any]) -> str | None:
    """The output in an event; None if there is none."""
    source = choice.get("delta") or choice
    for name in SPOKEN:
        if value := source.get(name):
            return value if name in ("text", "content") else ""
    return None


def _read_usage(usage: dict[str, Any] | None, record: Record) -> None:
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.output_tokens = usage.get("completion_tokens") or 0
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _reason(body: bytes) -> str:
    """Returns what an error says of itself, in few words."""
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        said = error if isinstance(error, str) else error.get("code") or error.get("type") or error.get("message")
    except (msgspec.DecodeError, AttributeError):
        said = body.decode("utf-8", "replace").strip()
    return str(said)[:100]


def _named(error: BaseException) -> str:
    """Without addresses, so that equal ones count as one."""
    if isinstance(error, asyncio.TimeoutError):
        return "timeout"
    cause = getattr(error, "os_error", error)
    return (getattr(cause, "strerror", None) or type(error).__name__)[:100]
