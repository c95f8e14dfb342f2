"""Owns the text the demo model learns from: which files, which split, which order.

The source is the Python standard library installed beside the running interpreter. Files are
split into training and held-out by a hash of their path, so the split never depends on the order
in which a file system lists them. Chat examples come from `chat_examples`.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chat_examples import chat_documents

# Tables and generated data: long runs of literals that would teach the model to recite numbers.
# `_sysconfigdata` and `python-config` record paths of the machine that built the interpreter.
EXCLUDED_PARTS = frozenset({"site-packages", "__pycache__", "encodings", "pydoc_data"})
EXCLUDED_PREFIXES = (
    "_sysconfigdata",
    "python-config",
    "test_unicode",
    "test_codecencodings",
    "test_codecmaps",
)
MAX_FILE_BYTES = 400_000
MAX_MEAN_LINE = 120
HELD_OUT_PER_MILLE = 40
LIBRARY_REPEATS = 2
"""Library code is seen twice for every time test code is: it has the docstrings and the variety,
while test code is longer and more repetitive."""
CHAT_SHARE = 0.16


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus, with its path relative to the library root."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to a test suite rather than to the library proper."""
        parts = self.path.split("/")
        return any(part in ("test", "tests", "idle_test") for part in parts)

    @property
    def is_held_out(self) -> bool:
        """Whether the file is kept out of training; a function of its path alone."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


@dataclass(frozen=True)
class Corpus:
    """Everything the run reads: training files, held-out files and training chats."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    chats: list[str]

    def train_bytes(self) -> int:
        """Size in bytes of the training files, each counted once, chats excluded."""
        return sum(len(file.text.encode()) for file in self.train)


def stdlib_root() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path) -> Iterator[SourceFile]:
    """Yield the usable sources under `root` in path order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(relative.parts):
            continue
        if path.name.startswith(EXCLUDED_PREFIXES):
            continue
        raw = path.read_bytes()
        if not 100 <= len(raw) <= MAX_FILE_BYTES:
            continue
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # deliberately broken test inputs, or legacy encodings
        if "\0" in text or len(text) / (text.count("\n") + 1) > MAX_MEAN_LINE:
            continue
        yield SourceFile(relative.as_posix(), text)


def build_corpus(root: Path, seed: int, limit_files: int | None = None) -> Corpus:
    """Read, split and extend the corpus; `limit_files` keeps a smoke test small."""
    files = list(read_sources(root))
    if limit_files is not None:
        files = random.Random(seed).sample(files, min(limit_files, len(files)))
    train = [file for file in files if not file.is_held_out]
    held_out = [file for file in files if file.is_held_out]
    rng = random.Random(seed)
    library = [file.text for file in train if not file.is_test]
    seen_bytes = sum(len(file.text) * (1 if file.is_test else LIBRARY_REPEATS) for file in train)
    chats = chat_documents(library, rng, budget=int(CHAT_SHARE * seen_bytes))
    return Corpus(train, held_out, chats)


def training_order(corpus: Corpus, seed: int) -> list[tuple[str, int]]:
    """The order of documents in the training stream, as ("file" | "chat", index) pairs."""
    order: list[tuple[str, int]] = [("chat", i) for i in range(len(corpus.chats))]
    for i, file in enumerate(corpus.train):
        order.extend([("file", i)] * (1 if file.is_test else LIBRARY_REPEATS))
    random.Random(seed).shuffle(order)
    return order
