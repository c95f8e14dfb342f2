"""Look-ups of hosts' names, in threads of their own: those of a slow name server keep no other work waiting."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult

NUM_THREADS: Final = 32  # more than fetches, since a look-up that nothing waits for any more keeps its thread


class LookUps(AbstractResolver):
    """The system's look-up of names."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "lookups")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(where[0]), port=port, family=kind, proto=protocol, flags=numeric)
            for kind, _, protocol, _, where in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
