"""Where the ranks of a group find each other: the key-value stores of torch, by URL.

Owns: reading the URL.  Does not know: what ranks tell each other there.
"""

import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore

from engine.errors import PluginError

SCHEMES = "file:///path (one machine), tcp://host:port (rank 0 listens there), env:// (what torchrun sets)"


def open_store(plugin: str, url: str, rank: int, size: int, timeout_s: float) -> Store:
    """The store that all ranks of one group share.  Rank 0 serves it where it takes a server.

    url: one of ``SCHEMES``; a group that is started again needs a new one.  plugin: for errors.
    Raises PluginError if the URL is none of them, or nobody answers within timeout_s.
    """
    parts = urlsplit(url)
    try:
        match parts.scheme:
            case "file" if parts.path:
                return _file_store(parts.path, size, timeout_s)
            case "tcp" if parts.hostname and parts.port:
                return _tcp_store(parts.hostname, parts.port, rank, size, timeout_s)
            case "env":
                return _tcp_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, size, timeout_s)
            case _:
                raise PluginError(f"{plugin}: rendezvous {url!r}, expected one of: {SCHEMES}")
    except KeyError as error:
        raise PluginError(f"{plugin}: rendezvous env:// needs the environment variable {error}; use torchrun") from None
    except (RuntimeError, ValueError) as error:  # torch's own errors of connecting are RuntimeErrors
        reason = str(error).splitlines()[0]
        raise PluginError(f"{plugin}: rank {rank} of {size} could not meet the others at {url}: {reason}") from error


def _file_store(path: str, size: int, timeout_s: float) -> Store:
    if not Path(path).parent.is_dir():
        raise ValueError(f"there is no directory {Path(path).parent}")
    store = FileStore(path, size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _tcp_store(host: str, port: int, rank: int, size: int, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
