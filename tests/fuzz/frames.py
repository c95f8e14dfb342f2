"""Foreign bytes as a frame between processes.

Owns: nothing more than the link's name.
"""

from pathlib import Path

from engine.workers.wire import Wire, WireError


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding.  A message that was read can be sent again."""
    wire = Wire("fuzz")
    try:
        message = wire.decode(data)
    except WireError:
        return
    wire.encode(message)
