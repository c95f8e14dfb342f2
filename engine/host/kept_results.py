"""Results of measurements, kept for the next start.

Owns: the file, its name, what is in it.  Does not know: what was measured.
A file that is missing, broken or cannot be written costs a measurement, never the start.
"""

import hashlib
import logging
import re
from typing import Generic, TypeVar

import msgspec

from engine.host.cache_folder import cache_folder, replace_file

log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER = "measured"
MOST_CHARACTERS = 80  # of a name that people read, before the digest


class _File(msgspec.Struct, Generic[T], forbid_unknown_fields=True):
    """The content of a file.  about: what the results hold for, for people."""

    about: str
    results: T


class KeptResults(Generic[T]):
    """The results of one measurement in a file of the user's cache folder.

    subject: what was measured, as in "linear kernels".
    about: what the results hold for, in words.
    holds_for: everything that they depend on, by its ``repr``.
    kind: the type of the results.
    path: the file; None without a home."""

    def __init__(self, subject: str, about: str, holds_for: object, kind: type[T]) -> None:
        self._subject = subject
        self._about = about
        self._kind = kind
        digest = hashlib.sha256(repr((subject, about, holds_for)).encode()).hexdigest()[:16]
        name = re.sub(r"[^A-Za-z0-9]+", "_", f"{subject} {about}")[:MOST_CHARACTERS]
        folder = cache_folder(FOLDER)
        self.path = folder and folder / f"{name}-{digest}.json"

    def load(self) -> T | None:
        """Return the results of an earlier start, or None."""
        try:
            if self.path is None or not self.path.exists():
                return None
            file: _File[T] = msgspec.json.decode(self.path.read_bytes(), type=_File[self._kind])  # type: ignore[name-defined]
            return file.results
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: results in %s are not used: %s", self._subject, self.path, error)
            return None

    def keep(self, results: T) -> None:
        """Replace the file as a whole, so that a reader sees the old results or these."""
        if self.path is None:
            return
        try:
            replace_file(self.path, msgspec.json.format(msgspec.json.encode(_File(self._about, results)), indent=1))
        except OSError as error:
            log.warning("%s: results are not kept for the next start: %s", self._subject, error)
