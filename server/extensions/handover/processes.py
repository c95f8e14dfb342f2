"""The engines of a split engine as processes of this machine.

Owns: their processes and the directory of their shared memory.  Does not know: requests, which engine computes what.
"""

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

import msgspec

from engine.config import Config, build_config
from engine.plugins.kinds import named
from engine.plugins.transfer.kind import TRANSFER
from engine.types.errors import ConfigError
from server.extensions.replicas.ray_fleet import config_of_replicas
from server.extensions.replicas.secret import FleetSecret

log = logging.getLogger(__name__)

END_S = 20.0
STEADY_S = 60.0  # an engine that lives so long has started well
MOST_PAUSE_S = 60.0


class EngineStart(msgspec.Struct, frozen=True):
    """The first line that an engine reads: its configuration as JSON, and the digest of the fleet's secret."""

    config: str
    digest: str


class LocalFleet:
    """A fleet of processes, each started again when it has ended.  Raises ConfigError for another carrier."""

    def __init__(self, config: Config, size: int) -> None:
        carrier = named(config.plugins, TRANSFER)
        if carrier not in ("none", "shared_memory"):
            raise ConfigError(
                f"plugins.transfer={carrier}: engines of one machine use shared_memory; set it, or nothing"
            )
        self.size = size
        secret = FleetSecret()
        self.headers: Mapping[str, str] = secret.headers
        self._digest = secret.digest
        limits = msgspec.structs.replace(config.limits, requests_per_minute=0, tokens_per_minute=0)
        self._config = msgspec.json.decode(config_of_replicas(msgspec.structs.replace(config, limits=limits)))
        self._folder = tempfile.TemporaryDirectory(prefix="callboard-", dir="/dev/shm")
        self._stopped = [False] * size
        self._num_failed = [0] * size  # ends in a row, each soon after a start
        self._started_at = [0.0] * size
        self._processes = [self._start(number) for number in range(size)]

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        options = self._config["plugins"].get("options", {}).get("transfer.shared_memory", {})
        options = {"path": self._folder.name, **options, "name": f"replica{number}"}
        more = {"plugins": {"transfer": "shared_memory", "options": {"transfer.shared_memory": options}}}
        config = build_config(build_config(Config(), self._config), more)
        self._started_at[number] = time.monotonic()
        start = EngineStart(msgspec.json.encode(config).decode(), self._digest)
        process = subprocess.Popen(
            [sys.executable, "-m", "server.extensions.handover.engine_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt at a terminal is for the router, which drains them
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
        return process

    async def url(self, number: int) -> str:
        """Returns where an engine listens; starts it if it has ended: later each time that it ends soon."""
        if self._processes[number].poll() is not None and not self._stopped[number]:
            code, after_s = self._processes[number].returncode, self._pause_s(number)
            log.warning("engine %d ended with code %d; it is started again in %g s", number, code, after_s)
            ended = self._processes[number]
            await asyncio.sleep(after_s)
            if self._stopped[number] or self._processes[number] is not ended:  # an operator stopped it meanwhile
                return ""
            self._end(number)
            self._processes[number] = self._start(number)
        process = self._processes[number]
        known = getattr(process, "url", "")
        if known:
            return str(known)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            await asyncio.sleep(1.0)  # it has ended; the next look starts it again
            return ""
        process.url = line.decode().strip()  # type: ignore[attr-defined]
        return str(line.decode().strip())

    def _pause_s(self, number: int) -> float:
        """Return the time until an engine that has ended is started again."""
        lived_s = time.monotonic() - self._started_at[number]
        failed = self._num_failed[number] = self._num_failed[number] + 1 if lived_s < STEADY_S else 0
        return float(min(MOST_PAUSE_S, 2 ** (failed - 1))) if failed else 0.0

    async def stop(self, number: int) -> None:
        """End an engine."""
        self._stopped[number] = True
        await asyncio.to_thread(self._end, number)

    async def start(self, number: int) -> None:
        """Start an engine that was stopped."""
        self._stopped[number] = False
        self._processes[number] = self._start(number)

    def close(self) -> None:
        for number in range(self.size):
            self._end(number)
        self._folder.cleanup()

    def _end(self, number: int) -> None:
        process = self._processes[number]
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()  # on which it ends
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
