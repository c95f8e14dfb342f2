"""A process that measures one attention backend.  It ends on request, or when the process that started it is gone.

Owns: the messages between the two.  Does not know: how a backend is measured, limits of time.
A backend that hangs, or that breaks its GPU's context, shares nothing with the engine: it is killed.

    python -m engine.startup.race_process      the command that ``RaceProcess`` runs
"""

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from engine.host.interpreters import import_path, module_command
from engine.startup.measurement import Measurement, RaceEntry


class RaceAnswer(msgspec.Struct, frozen=True):
    """The result of an entry.  us: load -> microseconds of all layers.  problem: why it is out, or ''.
    late: whether only time was lacking.  begun: whether it was started at all.  took: stage -> seconds."""

    us: dict[str, float]
    problem: str = ""
    late: bool = False
    begun: bool = True
    took: dict[str, float] = {}


class RaceProcess:
    """The starting process's side of the measurement of some entries, all of one contender."""

    def __init__(self, entries: Sequence[RaceEntry]) -> None:
        self._entries = entries
        self._compiled: list[RaceAnswer] = []
        self._dead: RaceAnswer | None = None
        # A session of its own: compilers that it has started end with it.  Unbuffered, so that ``select`` sees every
        # answer that was not read.
        self._process = subprocess.Popen(
            module_command("engine.startup.race_process", str(time.monotonic())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **import_path()},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._send(encode(entries))

    def compiled(self, timeout_s: float) -> Sequence[RaceAnswer]:
        """Wait until every entry is compiled or has failed.  Return their answers, fewer if that takes longer."""
        ends_at = time.monotonic() + timeout_s
        while len(self._compiled) < len(self._entries):
            phase = self._entries[len(self._compiled)].phase
            answer = self._answer(f"as {phase} was compiled", ends_at - time.monotonic())
            if answer is None:
                break
            # A process that is gone has nothing that could be measured.
            self._compiled = [answer] * len(self._entries) if answer is self._dead else [*self._compiled, answer]
        return self._compiled

    def measured(self, number: int, timeout_s: float) -> RaceAnswer | None:
        """Let it measure an entry, once all are compiled.  Return None if that takes longer."""
        self._send(b"%d\n" % number)
        return self._answer(f"as {self._entries[number].phase} was measured", timeout_s)

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
        with suppress(BrokenPipeError):  # the process has died, which ``_answer`` finds
            self._to.write(line)

    def _answer(self, when: str, timeout_s: float) -> RaceAnswer | None:
        """Return the next answer, or the same one for ever from a process that has died; None if there is none yet."""
        if self._dead is None:
            if not select.select([self._from], [], [], max(0.0, timeout_s))[0]:
                return None
            if line := self._from.readline():
                return msgspec.json.decode(line, type=RaceAnswer)
            self._dead = RaceAnswer({}, f"its process ended with exit code {self._process.wait()} {when}")
        return self._dead


def encode(entries: Sequence[RaceEntry]) -> bytes:
    """Return entries as their process reads them: a line of JSON."""

    def plain(value: Any) -> object:
        return value.tolist() if isinstance(value, Tensor) else str(value).removeprefix("torch.")

    return msgspec.json.encode(entries, enc_hook=plain) + b"\n"


def decode(line: bytes) -> list[RaceEntry]:
    """Return the entries that ``encode`` has written."""

    def built(kind: type, value: Any) -> object:
        if kind is Tensor:
            return torch.tensor(value)
        return torch.device(value) if kind is torch.device else getattr(torch, value)

    return msgspec.json.decode(line, type=list[RaceEntry], dec_hook=built)


# ---- in the process -------------------------------------------------------------------------


class RaceTrial:
    """One entry in this process.  took: seconds of what was done for it before.  doubles: of ``Measurement``."""

    def __init__(self, entry: RaceEntry, took: dict[str, float] | None = None, **doubles: Any) -> None:
        self._entry, self._doubles = entry, doubles
        self._took = took or {}
        self._measurement: Measurement | None = None

    def compiled(self) -> RaceAnswer:
        """Return the answer once everything is compiled: it has a problem or nothing."""
        return self._answer(self._compile)

    def measured(self) -> RaceAnswer:
        """Return the answer with the times, or a problem."""
        return self._answer(self._measure)

    def _compile(self) -> dict[str, float]:
        with self._timed("library"):
            self._measurement = Measurement(self._entry, **self._doubles)
        with self._timed("compiling"):
            self._measurement.compile()
        return {}

    def _measure(self) -> dict[str, float]:
        assert self._measurement is not None
        with self._timed("measuring"):
            return self._measurement.run()

    def _answer(self, work: Callable[[], dict[str, float]]) -> RaceAnswer:
        try:
            return RaceAnswer(work(), took=self._took)
        except (Exception, SystemExit) as error:  # any error is this contender's result
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return RaceAnswer({}, problem, took=self._took)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._took[stage] = time.monotonic() - began


def serve(requests: IO[bytes], answers: IO[bytes], began: float) -> None:
    """Compile the entries that come first, then measure the one that each request names.  It never returns.

    began: the time at which the process was started."""
    entries = decode(requests.readline())
    numbers: queue.Queue[int] = queue.Queue(maxsize=len(entries))
    threading.Thread(target=_listen, args=(requests, numbers), name="race-requests", daemon=True).start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all processes compare on the CPU now, and more threads than cores wait for each other
    trials: list[RaceTrial] = []
    for entry in entries:
        trials.append(RaceTrial(entry, {} if trials else {"start": time.monotonic() - began}))
        answers.write(msgspec.json.encode(trials[-1].compiled()) + b"\n")
    if entries[0].device.type == "cpu":
        torch.set_num_threads(threads)  # those of a step
    while True:
        answers.write(msgspec.json.encode(trials[numbers.get()].measured()) + b"\n")


def _listen(requests: IO[bytes], numbers: "queue.Queue[int]") -> None:
    """Wait for the end of requests: the starting process is gone then, so end this one and all that it has started."""
    for line in requests:
        numbers.put(int(line))
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the output of compilers is no answer
    serve(sys.stdin.buffer, answers, float(sys.argv[1]))
