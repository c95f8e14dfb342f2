"""A disk with little room, for what ``engine/host/appended_file.py`` writes."""

import os
from typing import Any

import pytest

from engine.host import appended_file


class SmallDisk:
    """The module ``os``, on a disk that takes ``room`` bytes more.  It takes what fits of a write, as disks do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        monkeypatch.setattr(appended_file, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = os.write(file, data[: self.room])
        self.room -= taken
        return taken
