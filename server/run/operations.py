"""The operations that operators may ask of the engine, for the server in its process and for one in a process of its
own.

Owns: which errors of the engine are the operator's, questions that are not answered yet.
Does not know: HTTP, signals; how the engine does any of it.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import Callable

import msgspec

from engine.actors.actor import Link
from engine.actors.feature import EngineFeature
from engine.actors.operations import Operate, Operated
from engine.config import Config, ConfigSource
from engine.control.changeover import Changeover
from engine.control.system import System
from engine.types.errors import CallboardError, ConfigError, PluginError, RequestError, WeightsError
from server.model_card import ModelCard

log = logging.getLogger(__name__)

MAX_ASKED = 8  # without an answer: they are done one after the other
SETTING = re.compile(rf"\b(?:{'|'.join(Config.__struct_fields__)})\.\w+")


class LocalOperations:
    """The operations of an engine in this process.

    source: where its configuration is from.  card: what the API says of it."""

    def __init__(self, system: System, source: ConfigSource, card: ModelCard) -> None:
        self._changeover = Changeover(system, lambda engine: msgspec.msgpack.encode(card.after_changes(engine)))
        self._source = source
        self._features = system.features
        self._answering: set[asyncio.Task[None]] = set()

    async def operate(self, ask: Operate) -> bytes:
        try:
            match ask.what:
                case "apply":
                    config = await asyncio.to_thread(self._source.load, ask.text)
                    is_sent = ask.text is not None
                    outcome = await self._changeover.apply(config, dry_run=ask.dry_run, is_sent=is_sent)
                    return msgspec.json.encode(outcome)
                case "sleep":
                    await self._changeover.sleep(ask.level, ask.tags)
                case "wake_up":
                    await self._changeover.wake(ask.tags)
                case "feature":
                    return await self._features.get(ask.feature, EngineFeature()).operate(ask.text or "")
        except CallboardError as error:
            raise _as_request_error(error) from error
        return b""

    def answer(self, ask: Operate, tell: Callable[[Operated], None]) -> None:
        """Do an operation, and send its outcome when it is done."""
        task = asyncio.create_task(self._answer(ask, tell), name="operations")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, ask: Operate, tell: Callable[[Operated], None]) -> None:
        try:
            tell(Operated(number=ask.number, outcome=await self.operate(ask)))
        except RequestError as error:
            tell(Operated(number=ask.number, error=error.message, status=error.status, code=error.code))
        except Exception:
            log.exception("the operation %s failed", ask.what)
            reason = "internal error; the server log has the details"
            tell(Operated(number=ask.number, error=reason, status=500, code="internal_error"))

    def reload(self) -> None:
        """Read the file that the server was started with again, and go over to what it says now."""
        if self._source.path is None:
            log.info("SIGHUP: the server was started without a file, so there is nothing to read again")
            return
        self.answer(Operate(what="apply"), self._log)

    def _log(self, done: Operated) -> None:
        log.info("SIGHUP: %s", done.outcome.decode()) if not done.error else log.error("SIGHUP: %s", done.error)


class RemoteOperations:
    """The operations of an engine in another process."""

    def __init__(self, engine: Link[Operate]) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Operated]] = {}

    async def operate(self, ask: Operate) -> bytes:
        if len(self._asked) >= MAX_ASKED:
            raise RequestError("too many changes are under way", status=429, code="queue_full", retry_after_s=1)
        number = next(self._numbers)
        answer: asyncio.Future[Operated] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._engine.put(msgspec.structs.replace(ask, number=number))
            done = await answer
        finally:
            del self._asked[number]
        if done.error:
            raise _refusal(done.error, done.status, done.code)
        return done.outcome

    def take(self, done: Operated) -> None:
        """Take an answer of the engine."""
        if (answer := self._asked.get(done.number)) is not None and not answer.done():
            answer.set_result(done)


def _as_request_error(error: CallboardError) -> RequestError:
    if isinstance(error, RequestError):
        return error
    is_operators = isinstance(error, ConfigError | PluginError | WeightsError)
    if is_operators:
        return _refusal(f"{error}; nothing has changed", 400, "invalid_settings")
    return _refusal(str(error), 503, "engine_failed")


def _refusal(reason: str, status: int, code: str) -> RequestError:
    named = SETTING.search(reason)
    return RequestError(reason, status=status, code=code, param=named[0] if named else None)
