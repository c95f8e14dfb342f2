"""TCP ports of 127.0.0.1 at which nothing listens.

The kernel gives ports of its ephemeral range to every outgoing connection, so one of these may be taken again before a
test listens there.  These ports lie below that range, and each call draws another one.
"""

import random
import socket

FIRST, LAST = 12_000, 31_999  # Linux's ephemeral range begins at 32,768


def free_port() -> int:
    """Return a port at which nothing listens just now.  Raises OSError if 100 in a row are taken."""
    drawn = random.SystemRandom()
    for _ in range(100):
        port = drawn.randint(FIRST, LAST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"100 ports between {FIRST} and {LAST} are taken")
