"""One child process: its start, end and reaping by the parent, and its own entry and exit.

Owns: the process, the pipe to its standard input, the ticket sent through it, signals, the tie of child to parent.
Does not know: what it computes, links.
The child never outlives its parent: the kernel kills it when the parent dies (Linux: PR_SET_PDEATHSIG, which cannot be
blocked), and on any system the pipe that the parent holds open ends.
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
from engine.host.interpreters import import_path, module_command
from engine.host.timeouts import is_set_within
from engine.workers.keys import ClientKeys
from engine.workers.messages import Place

# Kept from children: the parent sends a child the secrets that it needs.
SECRETS = frozenset(
    ENVIRONMENT_PREFIX + name for name in ("PLACEMENT__CLUSTER_KEY", "SERVER__API_KEY", "SERVER__OPERATOR_KEY")
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_TICKET_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
T = TypeVar("T", bound=msgspec.Struct)


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The address of a child's engine, with as little else as possible; the rest is sent over the link.

    rank: an executor's rank, a tokenizer's number, or 0.  parent: the process to die with; 0 for none.
    place: set for a rank of several machines."""

    rank: int
    link: str
    endpoint: str
    keys: ClientKeys
    parent: int = 0
    place: Place | None = None


class Child:
    """A process of ``python -m module`` with a ticket.  ended: called once on the loop with a text on how it ended.

    keep: descriptors that it inherits, under the same numbers."""

    def __init__(
        self, module: str, ticket: msgspec.Struct, ended: Callable[[str], None], keep: tuple[int, ...] = ()
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._gone = asyncio.Event()
        # A terminal's Ctrl-C must not reach the child before it ignores the signal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                module_command(module),
                stdin=subprocess.PIPE,
                pass_fds=keep,
                env={
                    **{name: value for name, value in os.environ.items() if name not in SECRETS},
                    **import_path(),
                },
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        assert self._process.stdin is not None
        frame = msgspec.msgpack.encode(ticket)
        with contextlib.suppress(BrokenPipeError):  # it died at once; ``_reap`` reports that
            self._process.stdin.write(struct.pack("<I", len(frame)) + frame)
            self._process.stdin.flush()  # and stays open: its end signals the parent's death to the child

    @property
    def alive(self) -> bool:
        """Whether the process has not been reaped."""
        return not self._gone.is_set()

    def let_go(self) -> None:
        """Close its standard input: a child that waits for that ends in order, any other is ended by it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process at once, even if it is stopped."""
        if self.alive:
            self._process.kill()

    async def wait(self, timeout_s: float) -> bool:
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
    """Read the ticket, serve, and exit without the interpreter's cleanup: a device may hang in it."""
    ticket = begin(Ticket)
    if ticket.parent:
        die_with(ticket.parent)
        threading.Thread(target=_watch, args=(sys.stdin.fileno(),), name="parent-watch", daemon=True).start()
    end(uvloop.run(serve(ticket)))


def begin(kind: type[T]) -> T:
    """Ignore the terminal's signals, and return the ticket from standard input."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent had blocked them for the start
    return read_ticket(sys.stdin.fileno(), kind)


def end(code: int) -> NoReturn:
    """Exit at once, without the interpreter's cleanup."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def read_ticket(pipe: int, kind: type[T]) -> T:
    """Read the ticket: its length as four bytes, then itself.  Ends the process if none arrives."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as stream:
        (length,) = struct.unpack("<I", stream.read(4) or sys.exit("callboard: started without a ticket"))
        if length > MAX_TICKET_BYTES:
            sys.exit(f"callboard: a ticket of {length} bytes")
        return msgspec.msgpack.decode(stream.read(length), type=kind)


def die_with(parent: int) -> None:
    """Have the kernel end this process when ``parent`` ends (Linux); end at once if it has already."""
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
