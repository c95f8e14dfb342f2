"""One child process: how its parent starts, ends and reaps it, and how it begins and ends itself.

Owns: the process, the pipe to its standard input, the ticket's way through it, signals, the tie between the two.
Does not know: what it computes, links.
The child never outlives its parent: the kernel kills it when the parent dies (Linux: PR_SET_PDEATHSIG, which nothing
can block, whatever the child is doing), and the end of the pipe that the parent holds open says the same on any system.
It ignores SIGINT and SIGTERM: a terminal sends them to every process of the group, and the parent decides when a child
ends.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import msgspec
import uvloop

from engine.config import ENVIRONMENT_PREFIX
from engine.host.timeouts import is_set_within
from engine.workers.keys import ClientKeys
from engine.workers.messages import Place

CLUSTER_KEY = f"{ENVIRONMENT_PREFIX}PLACEMENT__CLUSTER_KEY"  # nothing that a child would need
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_TICKET_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
T = TypeVar("T", bound=msgspec.Struct)


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How a child reaches its engine; it says as little as possible, the rest comes over the link.

    rank: of an executor, or a tokenizer's number, or 0.  parent: the process to die with; 0 for none.
    place: of a rank of several machines."""

    rank: int
    link: str
    endpoint: str
    keys: ClientKeys
    parent: int = 0
    place: Place | None = None


class Child:
    """``python -m module`` with a ticket.  ended: called once on the loop, with what became of it.

    keep: descriptors that it inherits, under the same numbers."""

    def __init__(
        self, module: str, ticket: msgspec.Struct, ended: Callable[[str], None], keep: tuple[int, ...] = ()
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._gone = asyncio.Event()
        # A terminal's Ctrl-C must not hit the child before it has learnt to leave that to us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                pass_fds=keep,
                env={
                    **{name: value for name, value in os.environ.items() if name != CLUSTER_KEY},
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        assert self._process.stdin is not None
        frame = msgspec.msgpack.encode(ticket)
        with contextlib.suppress(BrokenPipeError):  # it died at once; we hear of that below
            self._process.stdin.write(struct.pack("<I", len(frame)) + frame)
            self._process.stdin.flush()  # and stays open: its end is how a child hears of our death

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return not self._gone.is_set()

    def let_go(self) -> None:
        """Close its standard input: a child that waits for that takes its leave, any other ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once, stopped or not."""
        if self.alive:
            self._process.kill()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        return await is_set_within(timeout_s, self._gone)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self.let_go()
        self._gone.set()
        self._ended(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")


# ---- in the child ---------------------------------------------------------------------------


def enter(serve: Callable[[Ticket], Coroutine[Any, Any, int]]) -> None:
    """Read the ticket, serve, and leave without the ceremonies of an interpreter: a device may hang in them."""
    ticket = begin(Ticket)
    if ticket.parent:
        die_with(ticket.parent)
        threading.Thread(target=_watch, args=(sys.stdin.fileno(),), name="parent-watch", daemon=True).start()
    end(uvloop.run(serve(ticket)))


def begin(kind: type[T]) -> T:
    """Leave the terminal's signals to the parent, and return the ticket from standard input."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent had blocked them until here
    return read_ticket(sys.stdin.fileno(), kind)


def end(code: int) -> NoReturn:
    """Leave at once."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def read_ticket(pipe: int, kind: type[T]) -> T:
    """The ticket: its length as four bytes, then itself.  Ends the process if none comes."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as stream:
        (length,) = struct.unpack("<I", stream.read(4) or sys.exit("callboard: started without a ticket"))
        if length > MAX_TICKET_BYTES:
            sys.exit(f"callboard: a ticket of {length} bytes")
        return msgspec.msgpack.decode(stream.read(length), type=kind)


def die_with(parent: int) -> None:
    """From now on the kernel ends this process when ``parent`` ends (Linux); at once if it has already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _watch(pipe: int) -> None:
    wait_for_end(pipe)
    os._exit(1)


def wait_for_end(pipe: int) -> None:
    """Wait until the parent has closed its end of a pipe, or has ended."""
    while os.read(pipe, 1):
        pass
