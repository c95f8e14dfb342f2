"""Several machines on this one: each a process group of its own, which finds the others as torchrun's would."""

import socket
from typing import Any

from engine.config import Config, build_config
from engine.workers.cluster.environment import Cluster
from tests.workers.server import Server

KEY = "0123456789abcdef-the-key-of-the-cluster"
RANKS = ("device.tensor_parallel=2", "placement.executor=process", "placement.link=tcp://127.0.0.1:0")


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, port: int, *, size: int = 2, key: str = KEY) -> dict[str, str]:
    """What a launcher sets for one rank, and whoever deploys callboard."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "CALLBOARD_PLACEMENT__CLUSTER_KEY": key,
    }


def machine(rank: int, port: int, *overrides: str, **options: Any) -> Server:
    """``callboard serve`` for a rank; not waited for."""
    return Server(*RANKS, *overrides, wait=False, env=environment(rank, port), **options)


def configured(name: str = "", key: str = KEY, **placement: Any) -> Config:
    """What goes with two ranks on two machines."""
    sections = {
        "model": {"name": name},
        "device": {"tensor_parallel": 2},
        "placement": {"executor": "process", "link": "tcp://127.0.0.1:0", "cluster_key": key, **placement},
    }
    return build_config(Config(), sections)


def cluster(rank: int, port: int, size: int = 2, *, is_served: bool = False) -> Cluster:
    """What a rank would have read from its environment."""
    return Cluster(rank=rank, size=size, local_rank=0, host="127.0.0.1", port=port, is_served=is_served)
