"""A link between two machines in one process: connections pass through it slowly, are cut, or bring nothing at all.

Owns: the connections that it forwards, and their speed.  Does not know: what goes over them.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

CHUNK = 4096


class Link:
    """A forwarder from ``port`` to another port.  bytes_per_s: its speed each way; 0 for none, without an error."""

    def __init__(self, target: int) -> None:
        self.bytes_per_s = 1e9
        self.num_bytes = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._pumps: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """End every connection; new ones are forwarded again."""
        self._do(self._cut())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _cut(self) -> None:
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for pump in (self._pump(reader, back), self._pump(there, writer)):
            task = asyncio.ensure_future(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                while not self.bytes_per_s:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(len(data) / self.bytes_per_s)
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
