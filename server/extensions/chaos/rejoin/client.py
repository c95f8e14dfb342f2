"""A client whose connection may break: it comes back to its stream with the id of the last event that it has.

Owns: what it has of its stream.  Does not know: what it should have, servers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from server.extensions.chaos.ledger import Ledger
from server.extensions.chaos.rejoin.life import MODEL, ClientConnection, ServerLife
from server.extensions.chaos.rejoin.plan import RejoinOp

AGAIN_S = 0.2
NOT_FOUND = "stream_not_found"
TRY_LATER = frozenset({"not_kept", "stream_taken", "not_ready", "queue_full", "draining", "engine_died"})


class StreamClient:
    """A client.  server: returns the life that can be reached, None for none.  is_over: it has its end, or has left."""

    def __init__(self, number: int, op: RejoinOp, ledger: Ledger, server: Callable[[], ServerLife | None]) -> None:
        self.number = number
        self.is_over = False
        self.num_returns = 0
        self.connection: ClientConnection | None = None
        self._body = msgspec.json.encode(
            {
                "model": MODEL,
                "prompt": op.prompt,
                "max_tokens": op.max_tokens,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
        self._ledger, self._server = ledger, server
        self._num_events = 0
        self._has_asked = self._may_be_kept = False
        self._away_s = 0.0
        self._rest = b""
        ledger.note(
            "asked", request=number, prompt=list(op.prompt), most=op.max_tokens, least=op.max_tokens, stop_ids=[],
            stops=[], include_stop=False, ignore_eos=True, adapter=0,
        )  # fmt: skip
        self.task = asyncio.ensure_future(self._read())

    def leave(self) -> None:
        """Go away for good."""
        if not self.is_over:
            self.is_over = True
            self._ledger.note("left", request=self.number)
            self._cut()

    def go_away(self, seconds: float) -> None:
        """Lose the connection, and come back later."""
        self._away_s = seconds
        self._cut()

    def _cut(self) -> None:
        if self.connection is not None:
            self.connection.cut()

    async def _read(self) -> None:
        while not self.is_over:
            away_s, self._away_s = self._away_s or AGAIN_S, 0.0
            if self._has_asked:
                await asyncio.sleep(away_s)
            server = self._server()
            if server is None or self.is_over:
                self._has_asked = True
                continue
            self.num_returns += self._num_events > 0
            connection = self.connection = ClientConnection(self._take)
            self._rest = b""
            body = b"" if self._may_be_kept else self._body
            self._has_asked = self._may_be_kept = True
            answering = asyncio.ensure_future(
                server.answer(connection, f"stream-{self.number}", body, self._num_events)
            )
            await connection.closed.wait()
            answering.cancel()
            await asyncio.wait([answering])
            if not answering.cancelled():
                answering.result()
            code = "" if connection.error is None else connection.error.code
            if code == NOT_FOUND and not self._num_events:
                self._may_be_kept = False  # it was never taken, or it is lost, and nothing of it was sent
            elif code and code not in TRY_LATER:
                self._end(code)

    def _take(self, data: bytes) -> None:
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n"))
            if (event_id := fields.get(b"id")) is not None:
                self._num_events = int(event_id.rpartition(b":")[2])
            if (event := fields.get(b"data", b"[DONE]")) != b"[DONE]":
                self._take_event(msgspec.json.decode(event))

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._end(event["error"]["code"])
            return
        for choice in event["choices"]:
            if choice["token_ids"]:
                self._ledger.note("tokens", request=self.number, tokens=choice["token_ids"])
            if choice["finish_reason"]:
                self._end(choice["finish_reason"])

    def _end(self, why: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._ledger.note("end", request=self.number, why=why)
