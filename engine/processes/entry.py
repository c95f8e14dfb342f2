"""How a child process of the engine begins and ends: from the ticket on standard input to its exit code.

Owns: signals, the tie to the parent, the event loop's run.  Does not know: what the process is for.
It ignores SIGINT and SIGTERM: a terminal sends them to every process of the group, and it is the parent who decides
when a child ends.
"""

import logging
import os
import signal
import struct
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from engine.processes.assignment import Ticket
from engine.processes.parent import die_with

MAX_TICKET_BYTES = 1 << 16


def enter(serve: Callable[[Ticket], Coroutine[Any, Any, int]]) -> None:
    """Read the ticket, serve, and leave without the ceremonies of an interpreter: a device may hang in them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent had blocked them until here
    ticket = read_ticket(sys.stdin.fileno())
    if ticket.parent:
        die_with(ticket.parent, sys.stdin.fileno())
    code = uvloop.run(serve(ticket))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def read_ticket(pipe: int) -> Ticket:
    """The ticket: its length as four bytes, then itself.  Ends the process if none comes."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as stream:
        (length,) = struct.unpack("<I", stream.read(4) or sys.exit("callboard: started without a ticket"))
        if length > MAX_TICKET_BYTES:
            sys.exit(f"callboard: a ticket of {length} bytes")
        return msgspec.msgpack.decode(stream.read(length), type=Ticket)
