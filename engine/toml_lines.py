"""Which line of a TOML file sets a key, for messages about it.

Owns: a look at headers and assignments, good enough to point a person to the place.  Does not know: values, meanings.
"""

import re

# A bare or quoted key, or several with dots between them.
KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
KEYS = rf"{KEY}(?:\s*\.\s*{KEY})*"
HEADER = re.compile(rf"\s*\[\[?\s*({KEYS})\s*\]")
ASSIGNMENT = re.compile(rf"\s*({KEYS})\s*=")


def line_of(text: str, key: tuple[str, ...]) -> int | None:
    """The first line that sets ``key``, or failing that the innermost table it is in; None if none does."""
    table: tuple[str, ...] = ()
    best, found = 0, None
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            here = table = _parts(header[1])
        elif assignment := ASSIGNMENT.match(line):
            here = table + _parts(assignment[1])
        else:
            continue
        depth = min(len(here), len(key))
        if here[:depth] == key[:depth] and depth > best:
            best, found = depth, number
    return found


def _parts(keys: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(KEY, keys))
