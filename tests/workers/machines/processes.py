"""Several machines on this one: each is a process group of its own, started as a launcher would start it."""

from typing import Any

from engine.config import Config, build_config
from engine.workers.machines.launch import Launch, read_launch
from tests.workers.server import Server

KEY = "0123456789abcdef-the-key-of-the-machines"
RANKS = ("device.tensor_parallel=2", "placement.executor=process")


def link_to(port: int) -> str:
    """``placement.link`` for two processes, of which the node's link is at ``port``."""
    return f"tcp://127.0.0.1:{port - 1}"


def environment(index: int, port: int = 29500, *, size: int = 2, key: str = KEY) -> dict[str, str]:
    """The variables that a launcher sets for one process, and the key."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "RANK": str(index),
        "LOCAL_RANK": "0",
        "CALLBOARD_PLACEMENT__CLUSTER_KEY": key,
    }


def machine(index: int, ports: tuple[int, int], *overrides: str, **options: Any) -> Server:
    """``callboard serve`` for a process, without waiting for it.  ports: of the store and of the node's link."""
    link = f"placement.link={link_to(ports[1])}"
    return Server(*RANKS, link, *overrides, wait=False, env=environment(index, ports[0]), **options)


def configured(name: str = "", key: str = KEY, num_ranks: int = 2, **placement: Any) -> Config:
    """A configuration for two ranks on two machines."""
    sections = {
        "model": {"name": name},
        "device": {"tensor_parallel": num_ranks},
        "placement": {"executor": "process", "link": "tcp://127.0.0.1:29600", "cluster_key": key, **placement},
    }
    return build_config(Config(), sections)


def launch(index: int, config: Config, size: int = 2) -> Launch:
    """The launch of one process of ``config``."""
    return read_launch(environment(index, size=size), config)
