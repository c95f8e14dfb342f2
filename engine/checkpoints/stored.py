"""The tensors of a checkpoint, whatever kind of files it has.

Owns: the choice.  Does not know: torch, formats.
"""

from pathlib import Path

from engine.checkpoints.gguf import LINK, read_gguf
from engine.checkpoints.shards import StoredTensor, read_shards


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors by name.  Raises WeightsError naming the file and the tensor at fault."""
    return read_gguf(directory / LINK) if (directory / LINK).exists() else read_shards(directory)
