"""The Unix socket by which a trainer passes weights in memory: the descriptor itself, not its content.

Owns: the socket, and the form of a message.  Does not know: what weights are, when they change.

A message is one descriptor (SCM_RIGHTS) with a line of JSON, the fields of /update_weights but ``path``; the answer is
a line of JSON.  The socket's file is for its owner alone, and the kernel names the user of each connection.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from engine.features.weight_updates.engine import UpdateWeights
from engine.types.errors import ConfigError, RequestError
from server.extensions.weight_updates.engine_weights import EngineWeights, WeightsAnswer, mode_of
from server.openai.requests import Short

log = logging.getLogger(__name__)

LINE: Final = 64 << 10  # bytes of a message
BACKLOG: Final = 8


class SocketBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields beside a descriptor; see ``UpdateBody``."""

    version: Short = ""
    digest: Short = ""
    mode: Short | None = None
    max_versions: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None


class SocketError(msgspec.Struct, frozen=True):
    """The reason for which nothing has changed."""

    error: str


class WeightsSocket:
    """The socket of one server.  timeout_s: of a client that sends nothing.  Clients are answered one by one."""

    def __init__(self, path: Path, weights: EngineWeights, timeout_s: float) -> None:
        self._path = path
        self._weights = weights
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen.  Raises ConfigError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._path.is_socket():
                if _answers(self._path):
                    reason = "another server listens there; give each its own path"
                    raise ConfigError(f"server.weights_socket={self._path}: {reason}")
                self._path.unlink()  # of a server that was killed
            listening.bind(str(self._path))
            self._path.chmod(0o600)
            listening.listen(BACKLOG)
        except ConfigError:
            listening.close()
            raise
        except OSError as error:
            listening.close()
            raise ConfigError(f"server.weights_socket={self._path}: {error.strerror or error}") from None
        listening.setblocking(False)
        self._socket = listening
        self._task = asyncio.create_task(self._serve(listening), name="weights-socket")

    async def stop(self) -> None:
        """Listen no more."""
        if self._task is not None and self._socket is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._socket.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listening)
            with closing(client), _shut_down(client):
                answer = msgspec.json.encode(await self._answer(client)) + b"\n"
                try:
                    await asyncio.wait_for(loop.sock_sendall(client, answer), self._timeout_s)
                except OSError as error:
                    log.warning("a client of %s is gone: %s", self._path, error)

    async def _answer(self, client: socket.socket) -> WeightsAnswer | SocketError:
        try:
            line, memory = await asyncio.to_thread(_received, client, self._timeout_s)
            try:
                body = msgspec.json.decode(line, type=SocketBody)
                update = UpdateWeights(
                    directory="",
                    version=body.version,
                    digest=body.digest,
                    mode=None if body.mode is None else mode_of(body.mode),
                    max_versions=body.max_versions,
                )
            except BaseException:
                os.close(memory)
                raise
            return await self._weights.do(update, memory)
        except RequestError as error:
            return SocketError(error.message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            return SocketError(f"not a message: {error}")
        except Exception:
            log.exception("weights cannot be taken from %s", self._path)
            return SocketError("internal error; the server log has the details")


@contextmanager
def _shut_down(client: socket.socket) -> Iterator[None]:
    """End a connection, so that a thread which still reads from it ends too."""
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone
            client.shutdown(socket.SHUT_RDWR)


def _answers(path: Path) -> bool:
    """Return whether a server listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.setblocking(False)
        try:
            other.connect(str(path))
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
        return True


def _received(client: socket.socket, timeout_s: float) -> tuple[bytes, int]:
    """Return a line and the descriptor that came with it.  Raises OSError, and RequestError for anything else."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user not in (os.geteuid(), 0):
        raise RequestError(f"the socket is for user {os.geteuid()}, not {user}")
    client.settimeout(timeout_s)
    line, found = b"", list[int]()
    try:
        while not line.endswith(b"\n") and len(line) < LINE:
            more, descriptors, _, _ = socket.recv_fds(client, LINE, 2)
            found += descriptors
            line += more
            if not more:
                break
        if len(found) != 1 or not line.endswith(b"\n"):
            raise RequestError(f"expected a line with one descriptor, not {len(line)} bytes with {len(found)}")
        return line, found.pop()
    finally:
        client.setblocking(False)
        for one in found:
            os.close(one)
