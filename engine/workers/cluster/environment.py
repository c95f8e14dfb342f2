"""The machines that share one model, as this process finds them in its environment.

Owns: the variables of torch.distributed's launchers, and which settings go with them.
Does not know: how the processes on these machines find each other.
torchrun sets the variables; Slurm, Kubernetes or a person may as well.  They are read here and nowhere else.
"""

from collections.abc import Mapping

import msgspec

from engine.config import Config
from engine.types.errors import ConfigError

ANYWHERE = ("0.0.0.0", "*")
MOST_PORTS = 65535


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the ranks this process is for.  Rank 0's process is the *head*, the server; the others are *nodes*.

    local_rank: which GPU of its machine it takes.  host, port: of the rendezvous store; the head runs on that host.
    is_served: whether a launcher serves the store already; else the head does.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    is_served: bool = False

    @property
    def store(self) -> str:
        """Where the store is, for people and as a part of a URL."""
        return f"{self.host}:{self.port}"


def read_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """What the environment says; None if it says nothing, or that this process is alone.

    Raises ConfigError naming the variable that is missing or wrong."""
    size = _number(environment, "WORLD_SIZE", default=1, least=1)
    if size == 1:
        return None
    host = environment.get("MASTER_ADDR", "")
    if not host or "/" in host or any(character.isspace() for character in host):
        raise ConfigError(f"MASTER_ADDR={host!r}: with WORLD_SIZE={size} it must be the address of rank 0's machine")
    return Cluster(
        rank=_number(environment, "RANK", most=size - 1),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", default=0),
        host=host,
        port=_number(environment, "MASTER_PORT", least=1, most=MOST_PORTS),
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def check_cluster(cluster: Cluster, config: Config) -> None:
    """Raise ConfigError, saying what to set, if ``config`` does not go with these machines."""
    placement, num_ranks = config.placement, config.device.tensor_parallel
    if num_ranks != cluster.size:
        raise ConfigError(
            f"WORLD_SIZE={cluster.size}, but device.tensor_parallel={num_ranks}: set both to the number of ranks, "
            "or unset WORLD_SIZE to run all of them on this machine"
        )
    if placement.executor == "inline":
        raise ConfigError(f"WORLD_SIZE={cluster.size} needs placement.executor = 'process'")
    if not placement.link.startswith("tcp://"):
        raise ConfigError(
            f"placement.link={placement.link!r}: WORLD_SIZE={cluster.size} needs 'tcp://HOST:PORT', HOST being how "
            "other machines reach rank 0's, or 0.0.0.0 for MASTER_ADDR, and PORT 0 for any"
        )
    if not placement.cluster_key:
        raise ConfigError(
            f"WORLD_SIZE={cluster.size} needs placement.cluster_key, the same secret on every machine: "
            'CALLBOARD_PLACEMENT__CLUSTER_KEY="$(openssl rand -hex 32)"'
        )
    link_place(cluster, config)


def link_place(cluster: Cluster, config: Config) -> tuple[str, str, int]:
    """``placement.link`` as the address to listen on, the one that others reach it by, and the first port (0: any).

    Rank r's link listens on that port + r.  Raises ConfigError if there are not so many ports."""
    host, _, number = config.placement.link.removeprefix("tcp://").rpartition(":")
    port = int(number)
    if port + cluster.size - 1 > MOST_PORTS:
        raise ConfigError(f"placement.link: rank r's link is on port {port} + r, and there is no {MOST_PORTS + 1}")
    if host in ANYWHERE:
        return ANYWHERE[0], cluster.host, port
    return host, host, port


def _number(
    environment: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0, most: int = 1 << 31
) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text!r}: with WORLD_SIZE it must be a number from {least} to {most}")
    return int(text)
