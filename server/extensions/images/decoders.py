"""The processes that decode pictures: a few, started when they are needed.

Owns: how many there are, how long each may take, their end.  Does not know: what a picture is, requests.
A picture that takes too long, or ends its process, costs that process alone.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from itertools import chain
from typing import Final

import msgspec

from server.extensions.images.decoding import LENGTH_BYTES, PICTURE, Verdict
from server.extensions.images.places import Places

NUM_PROCESSES: Final = 3
PROCESSES_OF_ONE: Final = 2  # of a client
DECODE_TIMEOUT_S: Final = 10.0
ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")  # others may have secrets
PIECE_BYTES: Final = 64 << 10
COMMAND: Final = (sys.executable, "-m", "server.extensions.images.decoding")


class Decoders:
    """Judges pictures, so many at once."""

    def __init__(self) -> None:
        self._places = Places(NUM_PROCESSES, PROCESSES_OF_ONE)
        self._idle: list[Process] = []

    async def judge(self, data: bytes, client: str, kind: bytes = PICTURE) -> Verdict:
        """Return what a process finds of a picture, or of a film.

        Raises RequestError where the client's turn does not come."""
        async with self._places.of(client):
            process = await self._process()
            is_fit = False
            try:
                async with asyncio.timeout(DECODE_TIMEOUT_S):
                    verdict = await _ask(process, data, kind)
                is_fit = True
                return verdict
            except TimeoutError:
                return Verdict(f"takes longer than {DECODE_TIMEOUT_S:g} s to decode")
            except (OSError, EOFError):
                return Verdict("cannot be decoded: it ended the process that did so")
            finally:
                if is_fit:
                    self._idle.append(process)
                else:
                    await _end(process)

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _end(self._idle.pop())

    async def _process(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        return await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)


async def _ask(process: Process, data: bytes, kind: bytes) -> Verdict:
    assert process.stdin is not None
    assert process.stdout is not None
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    for piece in chain((kind + len(data).to_bytes(LENGTH_BYTES, "big"),), pieces):
        if process.stdin.is_closing():  # uvloop has a RuntimeError for it
            raise EOFError
        process.stdin.write(piece)
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    return msgspec.json.decode(line, type=Verdict)


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
