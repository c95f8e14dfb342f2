"""What reads foreign bytes, by name: each a module here with a function ``read``, and a folder of ``corpus``.

Owns: the names, the folder that a call works in.  Does not know: who makes the bytes.
A value, or the error of ours that is documented, is fine; each other exception is a finding.
"""

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TARGETS = ("frames", "gguf_files", "journals", "passages", "pictures", "recordings", "safetensors_headers", "uploads")
CORPUS = Path(__file__).parent / "corpus"


@contextmanager
def target(name: str) -> Iterator[Callable[[bytes], None]]:
    """A function that reads bytes, each time in a folder that is empty."""
    read = importlib.import_module(f"tests.fuzz.{name}").read
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / name

        def read_alone(data: bytes) -> None:
            folder.mkdir()
            try:
                read(data, folder)
            finally:
                shutil.rmtree(folder)

        yield read_alone
