"""Rendezvous of the ranks of a group: the key-value stores of torch, by URL.

Owns: the URLs.  Does not know: the contents of the stores.
"""

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from engine.types.errors import PluginError

SCHEMES = (
    "file:///path (one machine), tcp://host:port (rank 0 listens there), env:// (set by torchrun), "
    "store://host:port/name (an existing store; names separate groups)"
)
BACKLOG = 512
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
DISCARD_PORT = 9


def open_store(plugin: str, url: str, rank: int, size: int, timeout_s: float) -> Store:
    """Return the store that all ranks of one group share.  Rank 0 serves it if it needs a server.

    url: one of ``SCHEMES``; a restarted group needs a new one.  plugin: for errors.
    Raises PluginError if the URL is not one of them, or if there is no answer within timeout_s.
    """
    parts = urlsplit(url)
    try:
        match parts.scheme:
            case "file" if parts.path:
                return _file_store(parts.path, size, timeout_s)
            case "tcp" if parts.hostname and parts.port:
                return _tcp_store(parts.hostname, parts.port, rank, size, timeout_s)
            case "store" if parts.hostname and parts.port and parts.path.strip("/"):
                return PrefixStore(parts.path.strip("/"), join_store(parts.hostname, parts.port, timeout_s))
            case "env":
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
                    return join_store(host, port, timeout_s)
                return _tcp_store(host, port, rank, size, timeout_s)
            case _:
                raise PluginError(f"{plugin}: rendezvous {url!r}, expected one of: {SCHEMES}")
    except KeyError as error:
        raise PluginError(f"{plugin}: rendezvous env:// needs the environment variable {error}; use torchrun") from None
    except (RuntimeError, ValueError) as error:  # torch raises RuntimeError if it cannot connect
        reason = str(error).splitlines()[0]
        raise PluginError(f"{plugin}: rank {rank} of {size} could not meet the others at {url}: {reason}") from error


def local_address(url: str) -> str:
    """Return this machine's address on the route to the host of ``url``, by which ranks there can reach it.

    '' if the URL has no reachable host."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return LOOPBACK
    host = os.environ.get("MASTER_ADDR") if parts.scheme == "env" else parts.hostname
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, DISCARD_PORT))  # a datagram socket: the kernel finds a route and sends nothing
        except (OSError, UnicodeError):  # UnicodeError: not a valid host name
            return ""
        return str(probe.getsockname()[0])


def join_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to a store that is served elsewhere.  Raises RuntimeError if it is not reached within timeout_s."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def serve_store(host: str, port: int, timeout_s: float) -> Store:
    """Serve a store for as long as it is referenced: at ``host`` if that is an address of this machine, else at all.

    It needs no password.  Raises OSError if the port is taken."""
    listener = _listen(host, port)
    address = listener.getsockname()[0]
    return TCPStore(
        LOOPBACK if address == EVERYWHERE else address,  # for this process; others may use another address
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    address = LOOPBACK if host == "localhost" else host
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        address = EVERYWHERE  # a name may have several addresses, and other ones here than elsewhere
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind((EVERYWHERE, port))  # the address is translated before it reaches this machine
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _file_store(path: str, size: int, timeout_s: float) -> Store:
    if not Path(path).parent.is_dir():
        raise ValueError(f"there is no directory {Path(path).parent}")
    store = FileStore(path, size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _tcp_store(host: str, port: int, rank: int, size: int, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
