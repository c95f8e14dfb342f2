"""An encoder in a process of its own: one that is lost is started again, and has the picture again.

Legend: L layers that get rows · N places of a picture in the prompt · D model dim
Owns: the process, its restarts, the time for each picture.  Does not know: requests, rows of a step, encoders.

The process belongs to one rank, which needs the rows and sends one file after the other.  A thread of the rank waits
for the rows, and steps go on meanwhile.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final, TypeVar

import msgspec
import torch
from torch import Tensor

from engine.features.images.encoder_main import Encoded, EncoderTicket, ToEncode, read_exactly, receive, send
from engine.host.interpreters import import_path, module_command
from engine.types.errors import RequestError, WeightsError
from engine.workers.child import SECRETS

log = logging.getLogger(__name__)

MODULE: Final = "engine.features.images.encoder_main"
MOST_TRIES: Final = 3
"""The processes that one picture, or the first load, may cost before it is given up."""
LOAD_S: Final = 600.0
EXIT_S: Final = 1.0
T = TypeVar("T")


class ProcessLost(Exception):
    """A process has ended, or took too long and was ended."""


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
        try:
            send(self._popen.stdin, data)
            yield self._popen.stdout
        except BaseException as error:  # what is left of the answer would be read as the next one
            is_late = timer.finished.is_set()
            self.end(EXIT_S if isinstance(error, EOFError) else 0.0)
            if not isinstance(error, Exception):
                raise
            how = f"ended with code {self._popen.returncode}"
            if not isinstance(error, EOFError | OSError | ValueError):  # of a pipe that ``end`` has closed, too
                how = f"was ended, since its answer could not be read ({error!r})"
            raise ProcessLost(f"took longer than {within_s:g} s" if is_late else how) from None
        finally:
            timer.cancel()

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
        self._tried(lambda process: process)

    def encode(self, data: bytes, way: str) -> Tensor:
        """Return rows_LND of a picture.  Raises RequestError, and RuntimeError for a picture that ends processes."""
        picture = ToEncode(data, way)
        rows_LND = self._tried(lambda process: self._ask(process, picture))
        if rows_LND is None:
            ended = "the encoder is closed" if self._is_closed else f"{MOST_TRIES} processes of the encoder ended"
            raise RuntimeError(f"{ended} with this picture")
        return rows_LND

    def close(self) -> None:
        """End the process, from any thread.  Pictures fail from now on."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.end()

    def _tried(self, use: Callable[[_Process], T]) -> T | None:
        """Return what is read from a process with its weights; None if too many are lost, or the encoder is closed."""
        for _ in range(MOST_TRIES):
            try:
                process = self._process or self._started()
                return None if self._is_closed else use(process)
            except ProcessLost as lost:
                self._process = None
                if self._is_closed:
                    break
                log.warning("the process of the encoder %s; it is started again", lost)
        return None

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

    def _ask(self, process: _Process, picture: ToEncode) -> Tensor:
        with process.answer(msgspec.msgpack.encode(picture), self._patience_s) as stream:
            answer = msgspec.msgpack.decode(receive(stream), type=Encoded)
            rows = bytearray(read_exactly(stream, answer.num_bytes))
        if answer.reason:
            raise RequestError(answer.reason, status=answer.status)
        flat = torch.frombuffer(rows, dtype=self._dtype)
        return flat.view(answer.shape).to(self._device)  # raises RuntimeError for another number of bytes
