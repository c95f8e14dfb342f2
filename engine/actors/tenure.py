"""A desk of the tokenizer pool, and the processes that hold it one after the other.

Owns: whether the one that is there has loaded, and how long it has been quiet.
Does not know: requests, what to do about a process that is gone.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine.actors.watch import TICKS, Watch
from engine.actors.wire import WireError
from engine.errors import CallboardError
from engine.messages import TokenizerAlive, TokenizerInbox, TokenizerReady, TokenizerWord

GRACE_S = 0.2  # longer than it takes to hear of a process's end
LOAD_TIMEOUT_S = 120.0  # to import a few libraries and to read a tokenizer


class TokenizerLost(CallboardError):
    """A tokenizer's process is gone.  What it says names the process.  error: what it raised, if it got to say so."""

    def __init__(self, reason: str, error: CallboardError | None = None) -> None:
        super().__init__(reason)
        self.error = error


class Reports(Protocol):
    """Where a process's holder tells what it does; all calls on the event loop."""

    def heard(self, message: TokenizerWord) -> None:
        """It has said something."""
        ...

    def lost(self, loss: TokenizerLost) -> None:
        """It is gone.  Only the first loss counts."""
        ...


class Member(Protocol):
    """One tokenizer process."""

    def put(self, message: TokenizerInbox) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the process takes nothing."""
        ...

    async def end(self) -> None:
        """Let it finish what it has, and end; returns when it has ended, or has had its time."""
        ...

    async def kill(self) -> None:
        """End it at once if it still runs; returns when nothing of it is left.  Also after ``end``."""
        ...


Start = Callable[[str, int, Reports], Member]


class Desk:
    """name: of whichever process has it.  waiting, peak: of that one's mailbox, as it last said."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"tokenizer{number}"
        self.waiting = 0
        self.peak = 0
        self.tenure: Tenure | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a process, and it takes requests."""
        return self.tenure is not None and self.tenure.is_ready


class Owner(Protocol):
    """The pool, as a tenure sees it."""

    def take(self, desk: Desk, message: TokenizerWord) -> None:
        """The process of a desk says something."""
        ...

    def went(self, desk: Desk, loss: TokenizerLost) -> None:
        """The process of a desk is gone."""
        ...


class Tenure:
    """One process in a desk.  loss: why it is over.  When it is, nothing that the process still says is heard."""

    def __init__(self, owner: Owner, desk: Desk, silence_timeout_s: float) -> None:
        self.loss: asyncio.Future[TokenizerLost] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self._owner = owner
        self._desk = desk
        self._tick_s = silence_timeout_s / TICKS
        self._watch = Watch(0, TICKS)
        self._is_open = True
        self._member: Member | None = None
        desk.tenure = self
        desk.waiting = 0

    def begin(self, member: Member) -> None:
        """The process has been started."""
        self._member = member

    def put(self, message: TokenizerInbox) -> None:
        """To the process, which must be ready; one that takes nothing is as good as lost.  Raises WireError."""
        assert self.is_ready, f"{self._desk.name} is not ready for {type(message).__name__}"
        assert self._member is not None
        try:
            self._member.put(message)
        except WireError:
            raise
        except CallboardError as error:
            # It gets no more, and is not lost yet: what has become of it is known in a moment, and says more.
            self.is_ready = False
            loss = TokenizerLost(f"{self._desk.name}: {error}")
            asyncio.get_running_loop().call_later(GRACE_S, self.lost, loss)

    def heard(self, message: TokenizerWord) -> None:
        if not self._is_open:
            return
        self._watch.heard()
        match message:
            case TokenizerReady():
                self.is_ready = True
            case TokenizerAlive(waiting, peak):
                self._desk.waiting, self._desk.peak = waiting, peak
                return
        self._owner.take(self._desk, message)

    def lost(self, loss: TokenizerLost) -> None:
        if self._is_open:
            self.close()
            self.loss.set_result(loss)
            # Now, not when the desk's task gets its turn: nobody else may be given to this process.
            self._owner.went(self._desk, loss)

    def close(self) -> None:
        """Hear nothing any more, and take nothing."""
        self._is_open = self.is_ready = False

    async def keep_time(self) -> None:
        """Notice a process that does not load, or says nothing for too long."""
        name = self._desk.name
        loading_s = 0.0
        while self._is_open:
            await asyncio.sleep(self._tick_s)
            if self.is_ready:
                if (failing := self._watch.tick()) is not None:
                    self.lost(TokenizerLost(f"{name} {failing}"))
                continue
            loading_s += self._tick_s
            if loading_s > LOAD_TIMEOUT_S:
                self.lost(TokenizerLost(f"{name} has not loaded within {LOAD_TIMEOUT_S:.0f} s"))
