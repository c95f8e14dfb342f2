"""Foreign bytes as a GGUF file, which is unfolded: metadata to a configuration and a tokenizer, tensors to their names.

Owns: the file, and the cache folder that it is unfolded in.
"""

import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

from engine.checkpoints import gguf
from engine.types.errors import WeightsError


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    given = {"XDG_CACHE_HOME": str(folder / "cache")}
    with mock.patch.dict(os.environ, given), suppress(WeightsError):
        gguf.stored_tensors(gguf.unfold(path))
