"""Foreign bytes as a file of the journal, which a server reads when it starts.

Owns: how bytes become a file.  What does not begin as one does is the payload of a frame with the right checksum.
"""

from contextlib import suppress
from pathlib import Path

from engine.host.appended_file import frame
from engine.types.errors import ConfigError
from server.journal.journal import Journal
from server.journal.segments import MAGIC


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    if not data.startswith(MAGIC):
        data = MAGIC + frame(data)
    (folder / "00000001.log").write_bytes(data)
    with suppress(ConfigError):
        Journal(folder, fsync="never", most_bytes=1 << 20).close()
