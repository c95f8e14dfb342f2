"""The listening socket, taken before the model is loaded: a port in use must not cost minutes to find out.

Owns: the socket's options and the errors of getting it.  Does not know: what will serve on it.
"""

import errno
import os
import socket

from engine.types.errors import ConfigError

BACKLOG = 1024  # clients that connect while the event loop is busy
SEND_BUFFER_BYTES = 64 << 10  # per connection; the kernel would let it grow to megabytes before a slow reader shows


class ListenError(ConfigError):
    """The address cannot be listened on.  The exit code is Linux's number for "address already in use"."""

    exit_code = 98


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket that listens on ``host``:``port``; clients that connect wait until it is served.

    is_shared: other processes of this user may listen there too, if they share it as well; each gets a part of the
    clients.
    Raises ListenError, one line that names the address and says what to do.
    """
    where = f"server.host={host} server.port={port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"{where}: '{host}' is not a known address; use an IP address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
        listener.setblocking(False)
        listener.bind(address)
        # SO_REUSEADDR lets two sockets bind one port as long as neither listens, so only this makes it ours.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(f"{where}: {_reason(error, host, port)}") from None
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Returns where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; stop the process that listens there or set another server.port"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}; set a server.port of 1024 or more"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"'{host}' is not an address of this machine; 127.0.0.1 always is"
    return os.strerror(error.errno) if error.errno else str(error)
