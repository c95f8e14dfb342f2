"""The tokenizer pool: stands where the tokenizer stands, and hands its work to tokenizers in processes of their own.

consumes: Tokenize, Abort (ingress) · Tokens, Failed (scheduler) · Stop (system) · what each process says
produces: Admit, Abort (scheduler) · Deltas, Failed, TokenizersReady, TokenizersLost (ingress)
  Tokenize, Abort, Tokens, Failed (each process what belongs to its requests, in order)
waits for: the processes' loading and their end; never for a peer.   owns: which process has which request.

A process that dies, hangs or takes no more takes the text of its requests with it: those of which the scheduler knows
end with an error, those that were still being encoded are encoded again elsewhere, once.  Others notice nothing.
The process is started anew; new requests go to the others meanwhile, or wait.  See ``intensity`` for how often.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from engine.actors.actor import Actor
from engine.actors.mailbox import Link
from engine.messages import (
    Abort,
    Admit,
    Delta,
    Deltas,
    Failed,
    Finish,
    Tokenize,
    TokenizerAlive,
    TokenizerInbox,
    TokenizerReady,
    TokenizersLost,
    TokenizersReady,
    TokenizerWord,
    Tokens,
)
from engine.workers.group import Desk, Member, ProcessLost, Reports, Tenure, judge
from engine.workers.intensity import RestartIntensity
from engine.workers.routing import Shards
from engine.workers.wire import WireError

log = logging.getLogger(__name__)

TokenizerDesk = Desk[TokenizerWord, TokenizerInbox]
Start = Callable[[str, int, Reports[TokenizerWord]], Member[TokenizerInbox]]

LOST = "the tokenizer process that had this request was lost; send the request again"


@dataclass(slots=True)
class _Request:
    """One request that a process has, or will have.  desk: whose it is, -1 while there is no process for it.

    tokenize: the request itself, until the scheduler has it.  again: it has been with a process that was lost.
    cancelled: ingress wants to hear of its end only."""

    tokenize: Tokenize | None
    desk: int = -1
    again: bool = False
    cancelled: bool = False


class TokenizerPool(Actor[TokenizerInbox]):
    """start: (name, number, reports) -> a new process.  silence_timeout_s: one that says nothing for so long hangs."""

    def __init__(
        self,
        *,
        capacity: int,
        num_processes: int,
        start: Start,
        intensity: RestartIntensity,
        silence_timeout_s: float,
    ) -> None:
        super().__init__("tokenizers", capacity)
        self.desks = [TokenizerDesk(f"tokenizer{number}", number) for number in range(num_processes)]
        self.num_restarts = 0
        self._start = start
        self._intensity = intensity
        self._silence_timeout_s = silence_timeout_s
        self._shards = Shards(num_processes)
        self._requests: dict[int, _Request] = {}
        self._has_started = False
        self._told_to_stop = asyncio.Event()

    def connect(
        self,
        *,
        scheduler: Link[Admit | Abort],
        ingress: Link[Deltas | Failed | TokenizersReady | TokenizersLost],
    ) -> None:
        """Where results go; known only after those actors, which need this one's link, are built."""
        self._scheduler = scheduler
        self._ingress = ingress

    @property
    def num_ready(self) -> int:
        """Processes that take requests."""
        return sum(desk.is_ready for desk in self.desks)

    # ---- from the engine --------------------------------------------------------------------

    def handle(self, message: TokenizerInbox) -> None:
        match message:
            case Tokens():
                for number, part in self._shards.split(message):
                    self._send(number, part)
            case Tokenize():
                self._requests[message.request_id] = request = _Request(message)
                self._place(message, request)
            case Abort():
                self._abort(message)
            case Failed():
                if (known := self._requests.get(message.request_id)) is not None:
                    self._send(known.desk, message)
            case _:
                assert_never(message)

    def _place(self, message: Tokenize, request: _Request) -> None:
        """Give a request to a process, its own by preference; or to nobody, if there is none now."""
        ready = [desk.number for desk in self.desks if desk.is_ready]
        if not ready:
            return
        request_id = message.request_id
        number = request_id % len(self.desks)
        if number not in ready:
            number = ready[request_id % len(ready)]
            self._shards.move(request_id, number)
        request.desk = number
        self._send(number, message)

    def _abort(self, message: Abort) -> None:
        """Nobody wants it any more.  It is open until its process has let go of it, and says so."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        request.cancelled = True
        if request.tokenize is None:
            # Not by way of the process, which may die with it.
            self._scheduler.put(message)
        if request.desk < 0:
            self._end_cancelled(message.request_id)
        else:
            self._send(request.desk, message)

    def _end_cancelled(self, request_id: int) -> None:
        self._close(request_id)
        self._ingress.put(Deltas((Delta(request_id, "", finish=Finish.ABORT),)))

    def _send(self, number: int, message: TokenizerInbox) -> None:
        """To a process, if it is there: else what it had has ended already, and the message is late."""
        tenure = self.desks[number].tenure if number >= 0 else None
        if tenure is None or not tenure.is_ready:
            return
        try:
            tenure.put(message)
        except WireError as error:
            if not isinstance(message, Tokenize):
                raise
            self._close(message.request_id)
            self._ingress.put(Failed(message.request_id, f"the request cannot be tokenized: {error}"))

    def _close(self, request_id: int) -> _Request | None:
        """The one place where a request stops being open."""
        self._shards.forget(request_id)
        return self._requests.pop(request_id, None)

    # ---- from the processes -----------------------------------------------------------------

    def take(self, desk: TokenizerDesk, message: TokenizerWord) -> None:
        """What the process of a desk says.  As with a message in the mailbox, what goes wrong here ends this actor."""
        try:
            self._take_word(desk, message)
        except Exception as error:
            self._finish(error)

    def _take_word(self, desk: TokenizerDesk, message: TokenizerWord) -> None:
        match message:
            case Deltas():
                for delta in message.deltas:
                    if delta.finish != Finish.RUNNING:
                        self._close(delta.request_id)
                self._ingress.put(message)
            case Admit():
                request = self._requests.get(message.request_id)
                if request is not None and request.desk == desk.number and not request.cancelled:
                    request.tokenize = None
                    self._scheduler.put(message)
            case Abort():
                if (known := self._requests.get(message.request_id)) is not None and not known.cancelled:
                    self._scheduler.put(message)
            case Failed():
                if self._close(message.request_id) is not None:
                    self._ingress.put(message)
            case TokenizerReady():
                self._came(desk)
            case TokenizerAlive():
                pass  # the desk's own business
            case _:
                assert_never(message)

    def _came(self, desk: TokenizerDesk) -> None:
        log.info("%s is ready", desk.name)
        if not self._has_started and self.num_ready < len(self.desks):
            return
        if not self._has_started or self.num_ready == 1:
            self._ingress.put(TokenizersReady())
        self._has_started = True
        for request in list(self._requests.values()):
            if request.desk < 0 and request.tokenize is not None:
                self._place(request.tokenize, request)

    def went(self, desk: TokenizerDesk, loss: ProcessLost) -> None:
        """The process of a desk is gone, and with it the text of its requests."""
        try:
            self._let_go(desk, loss)
        except Exception as error:
            self._finish(error)

    def _let_go(self, desk: TokenizerDesk, loss: ProcessLost) -> None:
        if self._has_started and not self.num_ready:
            self._ingress.put(TokenizersLost(str(loss)))
        theirs = [(one, request) for one, request in self._requests.items() if request.desk == desk.number]
        num_failed = 0
        for request_id, request in theirs:
            if request.cancelled:
                self._end_cancelled(request_id)
                continue
            if request.tokenize is not None and not request.again:
                # Nothing was said of it yet, so nothing is lost.  Once only: it may be what has killed the process.
                self._shards.forget(request_id)
                request.desk, request.again = -1, True
                self._place(request.tokenize, request)
                continue
            self._close(request_id)
            if request.tokenize is None:
                self._scheduler.put(Abort(request_id))
            self._ingress.put(Failed(request_id, LOST, 503, "tokenizer_lost"))
            num_failed += 1
        if theirs:
            log.warning("%s had %d requests, of which %d end with an error", desk.name, len(theirs), num_failed)

    # ---- the processes' lives ---------------------------------------------------------------

    async def run(self) -> None:
        """Handle messages until Stop, with a process in every desk.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        async with asyncio.TaskGroup() as group:
            for desk in self.desks:
                group.create_task(self._keep(desk), name=desk.name)
            try:
                await super().run()
            finally:
                self._told_to_stop.set()

    async def _keep(self, desk: TokenizerDesk) -> None:
        """One process after the other."""
        while (loss := await self._fill(desk)) is not None:
            self._judge(loss)

    async def _fill(self, desk: TokenizerDesk) -> ProcessLost | None:
        """One process, from its start to its end."""
        tenure = Tenure(self, desk, self._silence_timeout_s)
        return await tenure.hold(lambda reports: self._start(desk.name, desk.number, reports), self._told_to_stop)

    def _judge(self, loss: ProcessLost) -> None:
        """Return if there may be another process."""
        judge(loss, has_started=self._has_started, intensity=self._intensity)
        self.num_restarts += 1
        log.warning("%s; it is restarted (%d so far)", loss, self.num_restarts)
