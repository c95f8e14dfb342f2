"""A process that measures one attention backend.  It ends on request, or when the process that started it is gone.

Owns: the messages between the two.  Does not know: how a backend is measured, limits of time.
A backend that hangs, or that breaks its GPU's context, shares nothing with the engine: it is killed.

    python -m engine.startup.race_process      the command that ``RaceProcess`` runs
"""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from engine.startup.measurement import Measurement, RaceEntry

COMPILED, MEASURE = b"compiled\n", b"measure\n"


class RaceAnswer(msgspec.Struct, frozen=True):
    """The result of a contender.  us: load -> microseconds of all layers.  problem: why it is out, or ''.
    late: whether only time was lacking.  begun: whether it was started at all."""

    us: dict[str, float]
    problem: str = ""
    late: bool = False
    begun: bool = True


class RaceProcess:
    """The starting process's side of a measurement."""

    def __init__(self, entry: RaceEntry) -> None:
        self._answer: RaceAnswer | None = None
        # A session of its own: compilers that it has started end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.startup.race_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._send(encode(entry))

    def is_compiled(self, timeout_s: float) -> bool:
        """Wait until it has compiled all it needs, or has failed.  Return False if that takes longer."""
        if not self._answers_within(timeout_s):
            return False
        self._answer = self._receive()
        return True

    def measured(self, timeout_s: float) -> RaceAnswer | None:
        """Let it measure, once it is compiled.  Return None if that takes longer."""
        if self._answer is None:
            self._send(MEASURE)
            if not self._answers_within(timeout_s):
                return None
            self._answer = self._receive()
        return self._answer

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._from.close()
        with suppress(BrokenPipeError):
            self._to.close()

    def _send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # the process has died, which ``_receive`` finds
            self._to.write(line)
            self._to.flush()

    def _answers_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._from], [], [], max(0.0, timeout_s))[0])

    def _receive(self) -> RaceAnswer | None:
        """Return the process's answer, or None for the message that it is compiled."""
        line = self._from.readline()
        if not line:
            return RaceAnswer({}, f"its process ended with exit code {self._process.wait()} and no result")
        return None if line == COMPILED else msgspec.json.decode(line, type=RaceAnswer)


def encode(entry: RaceEntry) -> bytes:
    """Return an entry as its process reads it: a line of JSON."""

    def plain(value: Any) -> object:
        return value.tolist() if isinstance(value, Tensor) else str(value).removeprefix("torch.")

    return msgspec.json.encode(entry, enc_hook=plain) + b"\n"


def decode(line: bytes) -> RaceEntry:
    """Return the entry that ``encode`` has written."""

    def built(kind: type, value: Any) -> object:
        if kind is Tensor:
            return torch.tensor(value)
        return torch.device(value) if kind is torch.device else getattr(torch, value)

    return msgspec.json.decode(line, type=RaceEntry, dec_hook=built)


# ---- in the process -------------------------------------------------------------------------


def measure(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Measure the entry that comes first, and send the answer."""
    entry = decode(requests.readline())
    may_run = threading.Event()
    threading.Thread(target=_listen, args=(requests, may_run), name="race-requests", daemon=True).start()
    try:
        measurement = Measurement(entry)
        measurement.compile()
        answers.write(COMPILED)
        may_run.wait()
        answer = RaceAnswer(measurement.run())
    except (Exception, SystemExit) as error:  # any error is this contender's result
        answer = RaceAnswer({}, " ".join(f"{type(error).__name__}: {error}".split())[:300])
    answers.write(msgspec.json.encode(answer) + b"\n")


def _listen(requests: IO[bytes], may_run: threading.Event) -> None:
    """Wait for the end of requests: the starting process is gone then, so end this one and all that it has started."""
    while requests.readline():
        may_run.set()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the output of compilers is no answer
    measure(sys.stdin.buffer, answers)
    os._exit(0)  # a device may hang when the interpreter shuts down
