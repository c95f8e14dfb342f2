"""Finding, stopping and killing the engine's child processes from outside, as an operator or the kernel would."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.pace import far


def children(parent: int | None = None, role: str = "executor") -> list[int]:
    """Processes of a role whose parent is ``parent``, ourselves by default; zombies are not alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if (
            state != "Z"
            and int(ppid) == (parent or os.getpid())
            and any(one.removesuffix(b"_main").endswith(role.encode()) for one in command)
        ):
            found.append(int(entry.name))
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether a process, not necessarily ours, still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def send(number: signal.Signals, parent: int | None = None) -> int:
    """Signal the one executor of ``parent``; returns its pid."""
    (pid,) = children(parent)
    os.kill(pid, number)
    return pid


@contextmanager
def held(parent: int) -> Iterator[None]:
    """Meanwhile the one executor of ``parent`` takes no step, so no stream ends."""
    pid = send(signal.SIGSTOP, parent)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was silent for too long, and has been replaced
            os.kill(pid, signal.SIGCONT)


def within(seconds: float, condition: Callable[[], bool], every_s: float = 0.03) -> float:
    """Wait for what takes no longer on an idle machine; returns how long it took, fails if that is far off."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < far(seconds), f"not within {far(seconds):.0f} s"
        time.sleep(every_s)
    return time.monotonic() - started
