"""Marks in an output: which version of the weights draws its tokens, from which token on.

Owns: the form of marks, as ``Delta.result`` has them.  Does not know: weights, when they change.
"""

from typing import Final

NOTE: Final = "weight_versions"  # among a sequence's notes: all of its marks


def mark(num_tokens: int, version: str) -> bytes:
    """Return the mark that output from its token ``num_tokens`` on is of a version; marks are joined as they are."""
    raw = version.encode()
    return num_tokens.to_bytes(4, "little") + len(raw).to_bytes(2, "little") + raw


def versions(marks: bytes) -> list[tuple[int, str]]:
    """Return the marks of an output, at most one for each token: the last one counts."""
    found: dict[int, str] = {}
    while marks:
        end = 6 + int.from_bytes(marks[4:6], "little")
        found[int.from_bytes(marks[:4], "little")] = marks[6:end].decode()
        marks = marks[end:]
    return list(found.items())
