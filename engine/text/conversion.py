"""Conversion of a checkpoint without tokenizer.json: transformers writes one from the checkpoint's other files.

transformers imports torch, so it runs once, in its own process.  The result is kept in the user's cache, named by the
content of the source files.

Owns: which files are sources, and running the conversion.  Does not know: their content.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from engine.checkpoints.gguf import LINK
from engine.checkpoints.gguf_header import GGUFHeader
from engine.checkpoints.gguf_tokenizer import tokenizer_files
from engine.host.cache_folder import cache_folder
from engine.host.interpreters import import_path, module_command
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

CONVERTER = "engine.formats.tokenizer_json"
WRITTEN = "tokenizer.json"
# Vocabularies of sentencepiece, tiktoken, Mistral and plain text; packages of the first two names read their files.
SOURCES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
BESIDE = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
ADVICE = "pip install 'callboard[transformers]'"
TIMEOUT_S = 300.0


def convert_tokenizer(directory: Path) -> Path | None:
    """Return a tokenizer.json made for a checkpoint that has none; None if it has no source for one.

    Raises WeightsError naming the file and the reason if it cannot be made; the next call tries again."""
    if (directory / LINK).is_file():
        tokenizer_files(GGUFHeader((directory / LINK).resolve()))  # raises why there is none
    source = next((directory / name for name in SOURCES if (directory / name).is_file()), None)
    if source is None:
        return None
    if find_spec("transformers") is None:
        raise WeightsError(f"{source}: without a {WRITTEN} next to it, transformers must convert it: {ADVICE}")
    try:
        folder = cache_folder("tokenizers")
        if folder is None:
            raise WeightsError(f"{source}: no home directory to keep its conversion in; set XDG_CACHE_HOME")
        kept = folder / _digest(directory) / WRITTEN
        if not kept.is_file():
            log.info("%s: converted to %s by transformers; this is done once", source, WRITTEN)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as partial:
                _convert(source, directory, Path(partial))
                kept.parent.mkdir(exist_ok=True)
                shutil.move(Path(partial) / WRITTEN, kept)
        return kept
    except OSError as error:
        raise WeightsError(f"{source}: its conversion cannot be kept: {error.strerror or error}") from None


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in (*SOURCES, *BESIDE):
        path = directory / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _convert(source: Path, directory: Path, target: Path) -> None:
    command = module_command(CONVERTER, str(directory), str(target))
    try:
        environment = {**os.environ, **import_path()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise WeightsError(f"{source}: transformers has not converted it within {TIMEOUT_S:.0f} s") from None
    if done.returncode or not (target / WRITTEN).is_file():
        reason = (done.stderr.strip().splitlines() or ["it wrote no tokenizer.json"])[-1]
        raise WeightsError(
            f"{source}: transformers cannot convert it: {reason}; if a package is missing: {ADVICE}; or set "
            "model.tokenizer to a directory with a tokenizer.json"
        )
