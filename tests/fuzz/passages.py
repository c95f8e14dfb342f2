"""Foreign bytes as the events of a replica, in pieces as a router gets them.

Owns: the pieces.
"""

from pathlib import Path

from server.proxy.passage import Passage, WrongMark


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    for size in (len(data) or 1, 7):
        passage = Passage(b"{}")
        try:
            told = b"".join(passage.take(data[at : at + size]) for at in range(0, len(data), size))
            assert len(told + passage.rest()) <= len(data)
        except WrongMark:
            pass
        passage.pieces()
