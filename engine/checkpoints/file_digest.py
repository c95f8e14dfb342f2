"""The SHA-256 of files of weights; computing it takes as long as reading them, so it is kept for later starts.

Owns: how an unchanged file is recognised, and where its digest is kept.
Does not know: the content of the files.
"""

import functools
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.host.cache_folder import cache_folder, replace_file

log = logging.getLogger(__name__)

MOST_THREADS = 8  # together faster than a disk; hashlib releases the interpreter's lock
KEPT_BYTES = 1 << 28  # the digest of a smaller file is computed within half a second, and not kept
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is written there
SHA256 = re.compile(r"[0-9a-f]{64}")


def file_digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file in hexadecimal digits.  Raises OSError."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    real = path.resolve()
    if real.parent.name == "blobs" and SHA256.fullmatch(real.name):
        return real.name  # the hub's cache names a download by its SHA-256
    path = real if real.exists() else path  # memory without a name is at the end of a link
    facts = path.stat()
    if SHARED_MEMORY.exists() and facts.st_dev == SHARED_MEMORY.stat().st_dev:
        return _computed(path)  # a process that has mapped it may change it, and its times stay
    # The inode's change time counts, too: images and archives may give all their files one mtime_ns.
    return _digest_of(path, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))


@functools.lru_cache(256)
def _digest_of(path: Path, facts: tuple[int, ...]) -> str:
    """Return the digest of a file with these facts: kept by this process or an earlier one, or computed."""
    folder = cache_folder("weights") if facts[0] >= KEPT_BYTES else None
    if folder is None:
        return _computed(path)
    kept = folder / hashlib.sha256(repr((str(path), *facts)).encode()).hexdigest()
    try:
        if SHA256.fullmatch(known := kept.read_text(errors="replace")):
            return known
    except OSError:
        pass  # nothing is kept yet
    log.info("%s: %.1f GB are read once for their SHA-256", path, facts[0] / 1e9)
    digest = _computed(path)
    try:
        replace_file(kept, digest.encode())
    except OSError as error:
        log.info("%s: its SHA-256 is computed at each start: %s", path, error)
    return digest


def _computed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
