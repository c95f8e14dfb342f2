"""One child process, as its parent holds it: started, told its ticket, watched, ended, and reaped.

Owns: the process and the pipe to its standard input.  Does not know: what it computes, links.
"""

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable

import msgspec

from engine.config import ENVIRONMENT_PREFIX
from engine.processes.assignment import Ticket

CLUSTER_KEY = f"{ENVIRONMENT_PREFIX}PLACEMENT__CLUSTER_KEY"  # nothing that a child would need
BLOCKED = (signal.SIGINT, signal.SIGTERM)


class Child:
    """``python -m module`` with a ticket.  ended: called once on the loop, with what became of it.

    keep: descriptors that it inherits, under the same numbers."""

    def __init__(self, module: str, ticket: Ticket, ended: Callable[[str], None], keep: tuple[int, ...] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._gone = asyncio.Event()
        # A terminal's Ctrl-C must not hit the child before it has learnt to leave that to us.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
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

    def kill(self) -> None:
        """End it at once, stopped or not."""
        if self.alive:
            self._process.kill()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if that did not come in time."""
        try:
            await asyncio.wait_for(self._gone.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._gone.set()
        self._ended(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
