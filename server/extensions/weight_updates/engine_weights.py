"""The weights of the engine behind a server, as its routes and its socket ask for them.

Owns: the way of a command to the engine, and the answer of most routes.  Does not know: bodies, what weights are.
"""

import asyncio
import os
from typing import Final

import msgspec
from aiohttp import web

from engine.actors.operations import Operate
from engine.features.weight_updates.engine import Asked, WeightsState
from engine.features.weight_updates.memory import place
from engine.features.weight_updates.messages import NAME, Mode
from engine.types.errors import FieldError, RequestError
from server.backend import Operations

# Also by the words of vLLM (wait) and SGLang (in_place).
MODES: dict[str, Mode] = {
    "abort": "abort", "finish": "finish", "wait": "finish", "keep": "keep", "in_place": "keep", "retract": "retract",
}  # fmt: skip


MOST_ASKED: Final = 16  # commands without an answer, each of which may have memory


class WeightsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that compute now.

    weight_version: as answers name it.  number: of changes since the start.  digest: fingerprint of the weights.
    took_s: seconds that the operation took.  released: memory that the engine has given back."""

    weight_version: str
    number: int
    digest: str
    is_paused: bool
    took_s: float
    released: tuple[str, ...] = ()


class EngineWeights:
    """The weights of one engine.  operations: None where several engines are behind one address."""

    def __init__(self, operations: Operations | None) -> None:
        self._engine = operations
        self._asking: set[asyncio.Task[WeightsState]] = set()

    async def ask(self, asked: Asked, memory: int | None = None) -> WeightsState:
        """Do a command, and return the state after it.  Raises RequestError.

        memory: with the tensors of an ``UpdateWeights``; it is closed once the command has ended.
        A client that leaves does not end it:
        the engine goes on with what it has begun."""
        if len(self._asking) >= MOST_ASKED:
            _close(memory)
            raise RequestError(
                f"{MOST_ASKED} commands about weights are under way", status=429, code="too_many_updates"
            )
        task = asyncio.create_task(self._ask(asked, memory), name="weights")
        self._asking.add(task)
        task.add_done_callback(self._asked)
        return await asyncio.shield(task)

    def _asked(self, task: asyncio.Task[WeightsState]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left

    async def _ask(self, asked: Asked, memory: int | None) -> WeightsState:
        try:
            if self._engine is None:
                reason = "the weights of one of several engines do not change"
                raise RequestError(reason, status=404, code="weights_off")
            if memory is not None:
                asked = msgspec.structs.replace(asked, directory=str(place(memory)))
            ask = Operate(what="feature", feature=NAME, text=msgspec.json.encode(asked).decode())
            return msgspec.json.decode(await self._engine.operate(ask), type=WeightsState)
        finally:
            _close(memory)

    async def do(self, asked: Asked, memory: int | None = None) -> WeightsAnswer:
        """Do a command, and return what a route answers; see ``ask``.  Raises RequestError."""
        state = await self.ask(asked, memory)
        return WeightsAnswer(
            weight_version=state.version,
            number=state.number,
            digest=state.digest,
            is_paused=state.paused,
            took_s=round(state.took_s, 6),
            released=state.released,
        )


def _close(memory: int | None) -> None:
    if memory is not None:
        os.close(memory)


def mode_of(given: str) -> Mode:
    """Return the mode of a word.  Raises FieldError."""
    if (mode := MODES.get(given)) is None:
        raise FieldError("mode", f"expected one of {', '.join(MODES)}, not {given!r:.40}")
    return mode


async def refuse_weights(request: web.Request) -> web.StreamResponse:
    """Refuse where several engines are behind one address.  Raises RequestError: 404."""
    reason = "weights change in one engine, and this server has several; send this to each of them"
    raise RequestError(reason, status=404, code="weights_off")
