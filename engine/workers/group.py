"""A desk that processes hold one after the other, as the actor has it that gives them work.

Owns: whether the process that is there has loaded, how long it has been quiet, and whether there may be another one.
Does not know: requests, what is lost with a process.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.errors import CallboardError, EngineDied
from engine.messages import FrontAlive, FrontReady, Message, TokenizerAlive, TokenizerReady
from engine.workers.intensity import RestartIntensity
from engine.workers.watch import TICKS, Watch
from engine.workers.wire import WireError

GRACE_S = 0.2  # longer than it takes to hear of a process's end
LOAD_TIMEOUT_S = 120.0  # to import a few libraries and to read a tokenizer

Word = TypeVar("Word", bound=Message)  # what a process says
Told = TypeVar("Told", bound=Message)  # what it is told
Word_contra = TypeVar("Word_contra", bound=Message, contravariant=True)
Told_contra = TypeVar("Told_contra", bound=Message, contravariant=True)


class ProcessLost(CallboardError):
    """A process is gone.  What it says names the process.  error: what it raised, if it got to say so."""

    def __init__(self, reason: str, error: CallboardError | None = None) -> None:
        super().__init__(reason)
        self.error = error


class Reports(Protocol[Word_contra]):
    """Where a process's holder tells what it does; all calls on the event loop."""

    def heard(self, message: Word_contra) -> None:
        """It has said something."""
        ...

    def lost(self, loss: ProcessLost) -> None:
        """It is gone.  Only the first loss counts."""
        ...


class Member(Protocol[Told_contra]):
    """One process."""

    def put(self, message: Told_contra) -> None:
        """Send.  Raises WireError if the message is over the limit, LinkError if the process takes nothing."""
        ...

    async def end(self) -> None:
        """Let it finish what it has, and end; returns when it has ended, or has had its time."""
        ...

    async def kill(self) -> None:
        """End it at once if it still runs; returns when nothing of it is left.  Also after ``end``."""
        ...


class Desk(Generic[Word, Told]):
    """name: of whichever process has it.  waiting, peak: of that one's mailbox, as it last said."""

    def __init__(self, name: str, number: int = 0) -> None:
        self.name = name
        self.number = number
        self.waiting = 0
        self.peak = 0
        self.tenure: Tenure[Word, Told] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a process, and it takes work."""
        return self.tenure is not None and self.tenure.is_ready


class Owner(Protocol[Word, Told]):
    """The actor, as a tenure sees it."""

    def take(self, desk: Desk[Word, Told], message: Word) -> None:
        """The process of a desk says something."""
        ...

    def went(self, desk: Desk[Word, Told], loss: ProcessLost) -> None:
        """The process of a desk is gone."""
        ...


class Tenure(Generic[Word, Told]):
    """One process in a desk.  loss: why it is over.  When it is, nothing that the process still says is heard."""

    def __init__(self, owner: Owner[Word, Told], desk: Desk[Word, Told], silence_timeout_s: float) -> None:
        self.loss: asyncio.Future[ProcessLost] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self._owner = owner
        self._desk = desk
        self._tick_s = silence_timeout_s / TICKS
        self._watch = Watch(0, TICKS)
        self._is_open = True
        self._member: Member[Told] | None = None
        desk.tenure = self
        desk.waiting = 0

    def put(self, message: Told) -> None:
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
            loss = ProcessLost(f"{self._desk.name}: {error}")
            asyncio.get_running_loop().call_later(GRACE_S, self.lost, loss)

    def heard(self, message: Word) -> None:
        if not self._is_open:
            return
        self._watch.heard()
        match message:
            case TokenizerReady() | FrontReady():
                self.is_ready = True
            case TokenizerAlive(waiting, peak) | FrontAlive(waiting, peak):
                self._desk.waiting, self._desk.peak = waiting, peak
                return
        self._owner.take(self._desk, message)

    def lost(self, loss: ProcessLost) -> None:
        if self._is_open:
            self._close()
            self.loss.set_result(loss)
            # Now, not when the desk's task gets its turn: nobody else may be given to this process.
            self._owner.went(self._desk, loss)

    def _close(self) -> None:
        """Hear nothing any more, and take nothing."""
        self._is_open = self.is_ready = False

    async def hold(
        self, start: Callable[[Reports[Word]], Member[Told]], told_to_stop: asyncio.Event
    ) -> ProcessLost | None:
        """From the process's start to its end.  Returns why it was lost; None if it was told to stop."""
        name = self._desk.name
        timer = asyncio.create_task(self._keep_time(), name=f"{name}.watch")
        stopping = asyncio.create_task(told_to_stop.wait(), name=f"{name}.stop")
        try:
            self._member = start(self)
            await asyncio.wait((self.loss, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not told_to_stop.is_set():
                return self.loss.result()
            if self.is_ready:  # who loads has nothing to finish
                await self._member.end()
            return None
        finally:
            self._close()
            timer.cancel()
            stopping.cancel()
            if self._member is not None:
                await self._member.kill()

    async def _keep_time(self) -> None:
        """Notice a process that does not load, or says nothing for too long."""
        name = self._desk.name
        loading_s = 0.0
        while self._is_open:
            await asyncio.sleep(self._tick_s)
            if self.is_ready:
                if (failing := self._watch.tick()) is not None:
                    self.lost(ProcessLost(f"{name} {failing}"))
                continue
            loading_s += self._tick_s
            if loading_s > LOAD_TIMEOUT_S:
                self.lost(ProcessLost(f"{name} has not loaded within {LOAD_TIMEOUT_S:.0f} s"))


def judge(loss: ProcessLost, *, has_started: bool, intensity: RestartIntensity) -> None:
    """Return if there may be another process.  has_started: there was one that had loaded.

    Raises what the first one raised, or EngineDied when restarting does not help."""
    if not has_started:
        # It never ran: what is wrong is the configuration, the checkpoint, the machine, and not a moment's fault.
        raise loss.error if loss.error is not None else EngineDied(f"{loss} while it started")
    intensity.spend(str(loss), asyncio.get_running_loop().time())
