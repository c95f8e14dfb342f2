"""The output of one request: a stream of deltas that are merged when the client is slow.

Owns: output that is not yet read; bounded by the request's max_tokens, since unread deltas merge.
Does not know: HTTP, actors, except through ``cancel``.

There are two ways to read.  ``next`` wakes a task for each delta.  ``relay`` calls a function within ``push``, which
costs a third of that: with hundreds of streams, waking tasks is most of the cost of a token.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec

from engine.messages import Delta, Finish
from engine.types.errors import CallboardError


def merged(deltas: Sequence[Delta]) -> Delta:
    """Return one delta equal to several in a row: values are joined if they can be, else the last one counts."""
    if len(deltas) == 1:
        return deltas[0]
    columns = zip(*map(msgspec.structs.astuple, deltas), strict=True)
    fields = zip(msgspec.structs.fields(Delta), columns, strict=True)
    return Delta(**{field.name: _joined(field.default, values) for field, values in fields})


def _joined(default: Any, values: tuple[Any, ...]) -> Any:
    match default:
        case str() | bytes():
            return default.join(values)
        case tuple():
            return tuple(chain.from_iterable(values))
        case _:
            return next((value for value in reversed(values) if value is not default), default)


class Stream:
    """Async iterator of deltas; ends after the one with a finish, or with a CallboardError.

    estimated_tokens: estimated length of its prompt."""

    def __init__(self, request_id: int, cancel: Callable[[int], None], estimated_tokens: int = 1) -> None:
        self.request_id = request_id
        self.estimated_tokens = estimated_tokens
        self._cancel = cancel
        self._pending: list[Delta] = []
        self._error: CallboardError | None = None
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()
        self._sink: Callable[[Delta], bool] | None = None
        self._sink_error: Exception | None = None
        self.has_output = False
        self._ended = False
        self._read_to_end = False

    @property
    def ended(self) -> bool:
        """Whether the request has had its terminal event."""
        return self._ended

    def push(self, delta: Delta) -> None:
        """Add output; called by ingress."""
        self.has_output = True
        if self._sink is not None:
            self._hand_over(self._sink, delta)
        else:
            self._pending.append(delta)
            self._arrived.set()
        if delta.finish != Finish.RUNNING:
            self._ended = True
            self._finished.set()

    def fail(self, error: CallboardError) -> None:
        """End the request with an error after the output so far; called by ingress."""
        self._error = error
        self._ended = True
        self._arrived.set()
        self._finished.set()

    async def next(self) -> Delta:
        """Return everything produced since the last call, as one delta.

        Raises RequestError or EngineDied if the request failed, StopAsyncIteration after the last delta.
        """
        if self._read_to_end:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        if not self._pending:
            self._read_to_end = True
            assert self._error is not None
            raise self._error
        # Output that the client has already is kept apart from new output.
        count = 1 if self._pending[0].resumed else len(self._pending)
        delta = merged(self._pending[:count])
        self._pending = self._pending[count:]
        if self._pending:
            self._arrived.set()
        self._read_to_end = delta.finish != Finish.RUNNING
        if self._error is not None:
            self._arrived.set()
        return delta

    async def relay(self, sink: Callable[[Delta], bool]) -> bool:
        """Call ``sink`` with every delta as it is produced; earlier output comes first, merged.

        sink: returns whether it accepts another delta now; until then they are kept here.  It must not wait.
        Returns whether that was all; if not, the sink is full, and this may be called again.
        Raises as ``next`` does, and what the sink raises.
        """
        while self._pending or self._error is not None:
            may_go_on = sink(await self.next())
            if self._read_to_end or not may_go_on:
                return self._read_to_end
        self._arrived.clear()
        self._sink = sink
        try:
            await self._arrived.wait()
        finally:
            self._sink = None
        if self._sink_error is not None:
            raise self._sink_error
        return self._read_to_end

    def _hand_over(self, sink: Callable[[Delta], bool], delta: Delta) -> None:
        """Call the sink.  Its errors are raised by ``relay``, not in the engine."""
        ended = delta.finish != Finish.RUNNING
        try:
            if sink(delta) and not ended:
                return
        except Exception as error:
            self._sink_error = error
        self._sink = None
        self._read_to_end = ended
        self._arrived.set()

    async def collect(self) -> Delta:
        """Wait for the end of the request and return all its output as one delta: one wake-up, not one per token.

        Raises as ``next`` does; output before a failure is dropped.
        """
        await self._finished.wait()
        if self._error is not None:
            raise self._error
        return await self.next()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        return await self.next()

    def close(self) -> None:
        """Cancel the request if it still runs; idempotent."""
        if not self._ended:
            self._ended = True
            self._cancel(self.request_id)
