"""An encoder in a process of its own: one that is lost is started again, and has its pictures again.

Legend: L layers that get rows · N places of a picture in the prompt · D model dim
Owns: the process, its restarts, the time for each picture.  Does not know: requests, rows of a step, encoders.

The process belongs to one rank, which needs the rows and sends one batch after the other.  A thread of the rank waits
for the rows, and steps go on meanwhile.  A batch that ends a process is sent again picture by picture, and a picture
pays for the processes that are lost while it alone is in them.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Final

import msgspec
import torch
from torch import Tensor

from engine.features.images.encoder_main import Encoded, EncoderTicket, read_exactly, receive, send
from engine.host.interpreters import import_path, module_command
from engine.plugins.encoder.encoder import ToEncode
from engine.types.errors import RequestError, WeightsError
from engine.workers.child import SECRETS

log = logging.getLogger(__name__)

MODULE: Final = "engine.features.images.encoder_main"
MOST_TRIES: Final = 3
"""The processes that one picture may cost, or that may be lost before they have a picture, before it is given up."""
LOAD_S: Final = 600.0
EXIT_S: Final = 1.0


class ProcessLost(Exception):
    """A process has ended, or took too long and was ended.  has_work: it had got what it was sent."""

    def __init__(self, how: str, *, has_work: bool) -> None:
        super().__init__(how)
        self.has_work = has_work


class _Process:
    """A process that answers one message after the other."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            module_command(MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which ends its children
            env={**{name: value for name, value in os.environ.items() if name not in SECRETS}, **import_path()},
        )

    @contextmanager
    def answer(self, data: bytes, within_s: float) -> Iterator[IO[bytes]]:
        """Send a message, and return the stream of its answer.  within_s: for both; 0 for any time.

        Raises ProcessLost.  A process that takes too long is killed, which also ends the wait for it."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        timer = threading.Timer(within_s, self._popen.kill)
        timer.daemon = True  # the interpreter ends without a wait for it
        if within_s:
            timer.start()
        has_work = False
        try:
            send(self._popen.stdin, data)
            has_work = True
            yield self._popen.stdout
        except BaseException as error:  # what is left of the answer would be read as the next one
            is_late = timer.finished.is_set()
            self.end(EXIT_S if isinstance(error, EOFError) else 0.0)
            if not isinstance(error, Exception):
                raise
            how = f"ended with code {self._popen.returncode}"
            if not isinstance(error, EOFError | OSError | ValueError):  # of a pipe that ``end`` has closed, too
                how = f"was ended, since its answer could not be read ({error!r})"
            raise ProcessLost(f"took longer than {within_s:g} s" if is_late else how, has_work=has_work) from None
        finally:
            timer.cancel()

    def has_ended(self) -> bool:
        """Return whether it has."""
        return self._popen.poll() is not None

    def end(self, after_s: float = 0.0) -> None:
        """Kill it, which ends a wait for it, and close the pipes.  Called on any thread.

        after_s: time for a process that is at its end, which may have an error to write."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(after_s)
        self._popen.kill()
        with suppress(OSError), self._popen:  # what it has not read is not sent
            pass


class TowerProcess:
    """A ``Tower`` whose work is done in a process.  patience_s: for one picture; 0 for any time.  nbytes: not ours."""

    nbytes = 0

    def __init__(self, ticket: EncoderTicket, device: torch.device, dtype: torch.dtype, patience_s: float) -> None:
        """Start the process, and wait until its weights are loaded.  Raises WeightsError if they cannot be.

        Where processes are lost meanwhile, the next picture starts another one."""
        self._ticket = ticket
        self._device = device
        self._dtype = dtype
        self._patience_s = patience_s
        self._is_closed = False
        self._process: _Process | None = None
        for _ in range(MOST_TRIES):
            if self._ready() is not None:
                break

    def encode(self, data: bytes, way: str) -> Tensor:
        """Return rows_LND of a picture.  Raises RequestError, and RuntimeError for a picture that ends processes."""
        (found,) = self.encode_each([ToEncode(data, way)])
        if isinstance(found, Exception):
            raise found
        return found

    def encode_each(self, pictures: Sequence[ToEncode]) -> list[Tensor | Exception]:
        """Return rows_LND of each picture, or what ``encode`` raises for it."""
        if len(pictures) > 1:
            with suppress(ProcessLost):
                if (process := self._ready()) is not None:
                    return self._ask(process, pictures)
            self._forget_ended()
        return [self._alone(one) for one in pictures]

    def _alone(self, picture: ToEncode) -> Tensor | Exception:
        """Return rows_LND of a picture, or why there are none."""
        num_lost = num_not_begun = 0
        while max(num_lost, num_not_begun) < MOST_TRIES and not self._is_closed:
            if (process := self._ready()) is None:
                num_not_begun += 1
                continue
            try:
                return self._ask(process, [picture])[0]
            except ProcessLost as lost:
                num_lost += lost.has_work
                num_not_begun += not lost.has_work
                self._lose(lost)
        if self._is_closed:
            return RuntimeError("the encoder is closed with this picture")
        if num_lost < MOST_TRIES:
            return RuntimeError(f"{MOST_TRIES} processes of the encoder ended before they had this picture")
        return RuntimeError(f"{MOST_TRIES} processes of the encoder ended with this picture")

    def close(self) -> None:
        """End the process, from any thread.  Pictures fail from now on."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.end()

    def _ready(self) -> _Process | None:
        """Return a process that has loaded its weights; None if it was lost meanwhile, or the encoder is closed.

        One that has ended without work is replaced.  Raises WeightsError."""
        self._forget_ended()
        try:
            process = self._process or self._started()
            return None if self._is_closed else process
        except ProcessLost as lost:
            self._lose(lost)
            return None

    def _forget_ended(self) -> None:
        if self._process is not None and self._process.has_ended():
            self._lose(ProcessLost("ended without a picture", has_work=False))

    def _lose(self, lost: ProcessLost) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None
        if not self._is_closed:
            log.warning("the process of the encoder %s; it is started again", lost)

    def _started(self) -> _Process:
        process = self._process = _Process()  # before it has loaded, so that ``close`` ends it
        if self._is_closed:
            process.end()
        with process.answer(msgspec.msgpack.encode(self._ticket), LOAD_S) as stream:
            answer = msgspec.msgpack.decode(receive(stream), type=Encoded)
        if answer.reason:
            process.end(EXIT_S)
            self._process = None
            raise WeightsError(answer.reason)
        return process

    def _ask(self, process: _Process, pictures: Sequence[ToEncode]) -> list[Tensor | Exception]:
        found: list[Tensor | Exception] = []
        with process.answer(msgspec.msgpack.encode(pictures), self._patience_s * len(pictures)) as stream:
            for _ in pictures:
                answer = msgspec.msgpack.decode(receive(stream), type=Encoded)
                rows = bytearray(read_exactly(stream, answer.num_bytes))
                if answer.reason:
                    found.append(RequestError(answer.reason, status=answer.status))
                    continue
                flat = torch.frombuffer(rows, dtype=self._dtype)
                found.append(flat.view(answer.shape).to(self._device))  # raises RuntimeError for another length
        return found
