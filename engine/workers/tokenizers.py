"""The tokenizer pool: it takes the place of the tokenizer, and distributes its work to tokenizer processes.

consumes: Tokenize, Abort (ingress) · Tokens, Failed (scheduler) · Stop (system) · messages of each process
produces: Admit, Abort (scheduler) · Deltas, Failed, TokenizersReady, TokenizersLost (ingress)
  Tokenize, Abort, Tokens, Failed (to each process those of its requests, in order)
waits for: the processes' loading and their end; never for a peer.   owns: which process has which request.

When a process dies, hangs or accepts nothing, the text of its requests is lost: those that the scheduler knows end with
an error, those that were still being encoded are encoded again elsewhere, once.  Other requests are not affected.
The process is restarted; new requests go to the others meanwhile, or wait.  ``RequestRouter`` knows which requests are
not in the process that their id selects, and splits the columns of ``Tokens``.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from engine.actors.actor import Actor, Link
from engine.actors.inboxes import TokenizerInbox
from engine.messages import Abort, Admit, Delta, Deltas, Failed, Finish, Tokenize, Tokens
from engine.types.notices import TokenizersLost, TokenizersReady
from engine.workers.group import Owner, Start, WorkerGroup, WorkerSlot, one_for_one
from engine.workers.limits import Patience, RestartIntensity
from engine.workers.messages import FromTokenizer, WorkerReady
from engine.workers.wire import WireError
from engine.workers.worker import WorkerLost

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # to import a few libraries and to read a tokenizer
LOST = "the tokenizer process that had this request was lost; send the request again"

V = TypeVar("V")
TokenizerSlot = WorkerSlot[FromTokenizer, TokenizerInbox]


class RequestRouter:
    """Assigns requests to processes: a request's home is its id modulo ``num_homes``, unless it was moved."""

    def __init__(self, num_homes: int) -> None:
        self._num_homes = num_homes
        self._moved: dict[int, int] = {}

    def home(self, request_id: int) -> int:
        """Return the home of a request."""
        return self._moved.get(request_id, request_id % self._num_homes)

    def move(self, request_id: int, home: int) -> None:
        """Set another home for a request, until ``forget``."""
        self._moved[request_id] = home

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended; unknown ones are ignored."""
        self._moved.pop(request_id, None)

    def split(self, message: Tokens) -> list[tuple[int, Tokens]]:
        """Return (home, its part) for every home with a part; lines keep their order.

        numpy works per line; Python works only per request with extras or cached tokens."""
        if self._num_homes == 1:
            return [(0, message)]
        request_ids = np.frombuffer(message.request_ids, dtype=np.int64)
        token_ids = np.frombuffer(message.token_ids, dtype=np.int32)
        finishes = np.frombuffer(message.finishes, dtype=np.uint8)
        homes = self._homes(request_ids)
        parts = []
        for home in range(self._num_homes):
            lines = np.flatnonzero(homes == home)
            part = Tokens(
                request_ids=request_ids[lines].tobytes(),
                token_ids=token_ids[lines].tobytes(),
                finishes=finishes[lines].tobytes(),
                cached_tokens=self._of_home(home, message.cached_tokens),
                extras=self._of_home(home, message.extras),
            )
            if len(lines) or part.extras:
                parts.append((home, part))
        return parts

    def _homes(self, request_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        homes = request_ids % self._num_homes
        if self._moved:  # only while requests run that arrived when their home was lost
            for line, request_id in enumerate(request_ids.tolist()):
                if (home := self._moved.get(request_id)) is not None:
                    homes[line] = home
        return homes

    def _of_home(self, home: int, by_request: Mapping[int, V]) -> dict[int, V]:
        return {request_id: one for request_id, one in by_request.items() if self.home(request_id) == home}


@dataclass(slots=True)
class _Request:
    """One request of a process.  slot: the number of its process, -1 while it has none.

    tokenize: the request itself, until the scheduler has it.  again: it was in a process that was lost.
    cancelled: only its end is reported to ingress."""

    tokenize: Tokenize | None
    slot: int = -1
    again: bool = False
    cancelled: bool = False


class TokenizerPool(Actor[TokenizerInbox], Owner[FromTokenizer, TokenizerInbox]):
    """The actor in place of the tokenizer.

    start: starts a process.  silence_timeout_s: one that sends nothing for longer hangs."""

    def __init__(
        self,
        *,
        capacity: int,
        num_processes: int,
        start: Start[FromTokenizer, TokenizerInbox],
        intensity: RestartIntensity,
        silence_timeout_s: float,
    ) -> None:
        super().__init__("tokenizers", capacity)
        self._group = WorkerGroup[FromTokenizer, TokenizerInbox](
            self,
            [f"tokenizer{number}" for number in range(num_processes)],
            one_for_one,
            lambda: nullcontext(start),
            intensity=intensity,
            patience=Patience(silence_s=silence_timeout_s, first_load_s=LOAD_TIMEOUT_S),
        )
        self.slots = self._group.slots
        self._router = RequestRouter(num_processes)
        self._requests: dict[int, _Request] = {}
        self._are_there = False  # the state last sent to ingress

    def connect(
        self, *, scheduler: Link[Admit | Abort], ingress: Link[Deltas | Failed | TokenizersReady | TokenizersLost]
    ) -> None:
        """Set the receivers of results; they need this actor's link, so they are built later."""
        self._scheduler = scheduler
        self._ingress = ingress

    @property
    def num_ready(self) -> int:
        """Processes that accept requests."""
        return self._group.num_ready

    @property
    def num_restarts(self) -> int:
        """Restarts of all processes together."""
        return self._group.num_restarts

    # ---- from the engine --------------------------------------------------------------------

    def handle(self, message: TokenizerInbox) -> None:
        match message:
            case Tokens():
                for number, part in self._router.split(message):
                    self._send(number, part)
            case Tokenize():
                self._requests[message.request_id] = request = _Request(message)
                self._place(message, request)
            case Abort():
                self._abort(message)
            case Failed():
                if (known := self._requests.get(message.request_id)) is not None:
                    self._send(known.slot, message)
            case _:
                assert_never(message)

    def _place(self, message: Tokenize, request: _Request) -> None:
        """Send a request to a process, its home by preference; it waits if no process is ready."""
        ready = [slot.number for slot in self.slots if slot.is_ready]
        if not ready:
            return
        request_id = message.request_id
        number = request_id % len(self.slots)
        if number not in ready:
            number = ready[request_id % len(ready)]
            self._router.move(request_id, number)
        request.slot = number
        self._send(number, message)

    def _abort(self, message: Abort) -> None:
        """Cancel a request.  It stays open until its process reports its end."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        request.cancelled = True
        if request.tokenize is None:
            # Sent directly, not through the process, which may die before it forwards the message.
            self._scheduler.put(message)
        if request.slot < 0:
            self._end_cancelled(message.request_id)
        else:
            self._send(request.slot, message)

    def _end_cancelled(self, request_id: int) -> None:
        self._close(request_id)
        self._ingress.put(Deltas(deltas=(Delta(request_id=request_id, text="", finish=Finish.ABORT),)))

    def _send(self, number: int, message: TokenizerInbox) -> None:
        """Send to a process, if it is ready; else its requests have ended already, and the message is late."""
        if number < 0 or not self.slots[number].is_ready:
            return
        try:
            self.slots[number].put(message)
        except WireError as error:
            if not isinstance(message, Tokenize):
                raise
            self._close(message.request_id)
            self._ingress.put(
                Failed(request_id=message.request_id, message=f"the request cannot be tokenized: {error}")
            )

    def _close(self, request_id: int) -> _Request | None:
        """Remove a request from the open ones; the only place that does so."""
        self._router.forget(request_id)
        return self._requests.pop(request_id, None)

    # ---- from the processes -----------------------------------------------------------------

    def take(self, slot: TokenizerSlot, message: FromTokenizer) -> None:
        match message:
            case Deltas():
                for delta in message.deltas:
                    if delta.finish != Finish.RUNNING:
                        self._close(delta.request_id)
                self._ingress.put(message)
            case Admit():
                request = self._requests.get(message.request_id)
                if request is not None and request.slot == slot.number and not request.cancelled:
                    request.tokenize = None
                    self._scheduler.put(message)
            case Abort():
                if (known := self._requests.get(message.request_id)) is not None and not known.cancelled:
                    self._scheduler.put(message)
            case Failed():
                if self._close(message.request_id) is not None:
                    self._ingress.put(message)
            case _:
                assert_never(message)

    def on_ready(self, slots: Sequence[TokenizerSlot], ready: Sequence[WorkerReady]) -> None:
        """Handle a loaded process; at the start, requests wait until all processes have loaded."""
        if not self._group.has_started:
            return
        if not self._are_there:
            self._are_there = True
            self._ingress.put(TokenizersReady())
        for request in list(self._requests.values()):
            if request.slot < 0 and request.tokenize is not None:
                self._place(request.tokenize, request)

    def on_lost(self, slots: Sequence[TokenizerSlot], loss: WorkerLost) -> None:
        """Handle the loss of a process, and with it of the text of its requests."""
        (slot,) = slots
        if self._are_there and not self.num_ready:
            self._are_there = False
            self._ingress.put(TokenizersLost(reason=str(loss)))
        theirs = [(one, request) for one, request in self._requests.items() if request.slot == slot.number]
        num_failed = 0
        for request_id, request in theirs:
            if request.cancelled:
                self._end_cancelled(request_id)
                continue
            if request.tokenize is not None and not request.again:
                # It has no output yet, so nothing is lost.  Only once: the request may have killed the process.
                self._router.forget(request_id)
                request.slot, request.again = -1, True
                self._place(request.tokenize, request)
                continue
            self._close(request_id)
            if request.tokenize is None:
                self._scheduler.put(Abort(request_id=request_id))
            self._ingress.put(Failed(request_id=request_id, message=LOST, status=503, code="tokenizer_lost"))
            num_failed += 1
        if theirs:
            log.warning("%s had %d requests, of which %d end with an error", slot.name, len(theirs), num_failed)

    async def run(self) -> None:
        """Handle messages until Stop, and keep the processes running.

        Raises what the first load raised, or EngineDied when restarting does not help."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._group.run(), name="tokenizers.group")
            try:
                await super().run()
            finally:
                self._group.stop()
