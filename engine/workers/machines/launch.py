"""The launch of this process, as torchrun, Slurm or Kubernetes describe it in the environment.

Owns: the launcher's variables, and the settings that they need.
Does not know: how the processes find each other.
"""

from collections.abc import Mapping
from importlib import metadata

import msgspec

from engine.config import Config
from engine.types.errors import ConfigError
from engine.workers.machines.settings import MachinesSettings
from engine.workers.messages import Place

ANYWHERE = ("0.0.0.0", "*")
MOST_PORTS = 65535


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that a launcher starts.  Process 0 is the *head*, the server; the others are *nodes*.

    index, size: RANK and WORLD_SIZE.  local_index: LOCAL_RANK.  ranks: how many of the model's ranks each process runs.
    host, port: node n reaches the head at port + n.  listens_on: the address that the head binds."""

    index: int
    size: int
    local_index: int
    ranks: int
    host: str
    port: int
    listens_on: str

    def place(self, rank: int) -> Place | None:
        """The place of a rank of the model in this process, or None if another process runs it."""
        first = self.index * self.ranks
        return Place(self.local_index * self.ranks + rank - first) if first <= rank < first + self.ranks else None

    def address(self, node: int) -> str:
        """The address at which a node reaches the head."""
        return f"{self.host}:{self.port + node}"

    def facts(self) -> dict[str, str]:
        """The facts that must be the same in all processes, by name."""
        versions = {name: _version(name) for name in ("callboard", "torch")}
        return {"WORLD_SIZE": str(self.size), "device.tensor_parallel": str(self.size * self.ranks), **versions}


def read_launch(environment: Mapping[str, str], config: Config) -> Launch:
    """The launch that the environment describes.

    Raises ConfigError if a variable is missing or wrong, or if ``config`` does not go with them."""
    size = _number(environment, "WORLD_SIZE", least=2)
    master = environment.get("MASTER_ADDR", "")
    if not master or "/" in master or any(character.isspace() for character in master):
        raise ConfigError(f"MASTER_ADDR={master!r}: with WORLD_SIZE={size} it must be the address of RANK 0's machine")
    _number(environment, "MASTER_PORT", least=1, most=MOST_PORTS)  # the ranks read it when they form their group
    index = _number(environment, "RANK", most=size - 1)
    local_index = _number(environment, "LOCAL_RANK", default=0)
    _check(size, config)
    host, _, port = config.placement.link.removeprefix("tcp://").rpartition(":")
    return Launch(
        index=index,
        size=size,
        local_index=local_index,
        ranks=config.device.tensor_parallel // size,
        host=master if host in ANYWHERE else host,
        port=int(port),
        listens_on=ANYWHERE[0] if host in ANYWHERE else host,
    )


def _check(size: int, config: Config) -> None:
    placement, num_ranks = config.placement, config.device.tensor_parallel
    if num_ranks % size:
        raise ConfigError(
            f"WORLD_SIZE={size}, but device.tensor_parallel={num_ranks}: every process runs the same number of ranks; "
            "set device.tensor_parallel to a multiple of WORLD_SIZE, or unset WORLD_SIZE to run all on this machine"
        )
    if placement.executor == "inline":
        raise ConfigError(f"WORLD_SIZE={size} needs placement.executor = 'process'")
    port = int(placement.link.rpartition(":")[2]) if placement.link.startswith("tcp://") else 0
    if not 1 <= port <= MOST_PORTS + 1 - size:
        raise ConfigError(
            f"placement.link={placement.link!r}: WORLD_SIZE={size} needs 'tcp://HOST:PORT': HOST is the address of "
            "RANK 0's machine, or 0.0.0.0 for MASTER_ADDR; the process with RANK r joins at PORT + r, so PORT is from "
            f"1 to {MOST_PORTS + 1 - size}"
        )
    if not MachinesSettings.read(placement).cluster_key:
        raise ConfigError(
            f"WORLD_SIZE={size} needs placement.cluster_key, the same secret on every machine: "
            'CALLBOARD_PLACEMENT__CLUSTER_KEY="$(openssl rand -hex 32)"'
        )


def _number(
    environment: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0, most: int = 1 << 31
) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text!r}: with WORLD_SIZE it must be a number from {least} to {most}")
    return int(text)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "unknown"
