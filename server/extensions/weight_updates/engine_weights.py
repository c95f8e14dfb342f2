"""The weights of the engine behind a server, as its routes and its socket ask for them.

Owns: the way of a command to the engine, and the answer of most routes.  Does not know: bodies, what weights are.
"""

import msgspec
from aiohttp import web

from engine.actors.operations import Operate
from engine.features.weight_updates.engine import Asked, WeightsState
from engine.features.weight_updates.messages import NAME, Mode
from engine.types.errors import FieldError, RequestError
from server.backend import Operations

# Also by the words of vLLM (wait) and SGLang (in_place).
MODES: dict[str, Mode] = {
    "abort": "abort", "finish": "finish", "wait": "finish", "keep": "keep", "in_place": "keep", "retract": "retract",
}  # fmt: skip


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

    async def ask(self, asked: Asked) -> WeightsState:
        """Do a command, and return the state after it.  Raises RequestError."""
        if self._engine is None:
            raise RequestError("the weights of one of several engines do not change", status=404, code="weights_off")
        ask = Operate(what="feature", feature=NAME, text=msgspec.json.encode(asked).decode())
        return msgspec.json.decode(await self._engine.operate(ask), type=WeightsState)

    async def do(self, asked: Asked) -> WeightsAnswer:
        """Do a command, and return what a route answers.  Raises RequestError."""
        state = await self.ask(asked)
        return WeightsAnswer(
            weight_version=state.version,
            number=state.number,
            digest=state.digest,
            is_paused=state.paused,
            took_s=round(state.took_s, 6),
            released=state.released,
        )


def mode_of(given: str) -> Mode:
    """Return the mode of a word.  Raises FieldError."""
    if (mode := MODES.get(given)) is None:
        raise FieldError("mode", f"expected one of {', '.join(MODES)}, not {given!r:.40}")
    return mode


async def refuse_weights(request: web.Request) -> web.StreamResponse:
    """Refuse where several engines are behind one address.  Raises RequestError: 404."""
    reason = "weights change in one engine, and this server has several; send this to each of them"
    raise RequestError(reason, status=404, code="weights_off")
