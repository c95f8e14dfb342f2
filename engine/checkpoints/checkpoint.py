"""Finding a checkpoint and reading its description, before any weight or torch is loaded.

Owns: resolving a model path, and ModelSpec.  Does not know: torch, tensors, ranks.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoints.feature import CheckpointFeature, Reading
from engine.checkpoints.fields import Fields, read_fields
from engine.checkpoints.gguf import STORED_FORMATS, SUFFIX, unfold
from engine.checkpoints.quantization import MXFP4, Quantization, read_quantization
from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.text_part import read_text_part
from engine.checkpoints.use import GENERATING, ModelUse
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

DEMO = "demo"
DEMO_NAME = "callboard-demo"
"""Name under which the demo model is served."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_ADDRESS = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
DESCRIPTION = ["*.json"]
"""Files without weights that ``read_spec`` reads."""
# Second copies of the weights in other layouts, which some repositories contain.  A folder whose name begins with a
# number is a module of sentence-transformers.
HUB_COPIES = ["[!0-9]*/*", "consolidated*"]
MAX_SHOWN_IDS = 8
DTYPES = ("float32", "bfloat16", "float16")


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Recommendations of generation_config.json; None for those that it does not have."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model by its checkpoint directory.

    dtype: type in which the weights were saved.  quantization: how they are rounded, if they are.
    eos_token_ids: every id that ends a text, sorted, maybe none.  All token ids here are in the vocabulary.
    config: config.json as it is.
    use: what requests may ask of the model.
    """

    directory: Path
    architecture: str
    shape: DecoderShape
    dtype: str
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    config: dict[str, Any]
    use: ModelUse = GENERATING

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may be more than the tokenizer uses."""
        return self.shape.vocab_size

    @property
    def state_bytes(self) -> int:
        """Memory that the recurrent layers take for one row on a rank; 0 without such layers."""
        return self.shape.state_bytes

    @property
    def stored_formats(self) -> tuple[str, ...]:
        """Formats of blocks in which the files store matrices, by ggml's names; or 'int4' of AWQ, GPTQ and so on."""
        if self.quantization is None:
            return tuple(self.config.get(STORED_FORMATS, ()))
        if self.quantization.method == MXFP4:
            return ("MXFP4",)
        return ("int4",) if self.quantization.is_int4 else ()

    @property
    def max_len(self) -> int:
        """Longest sequence that the model was trained for."""
        return min(self.shape.max_len, self.use.max_len or self.shape.max_len)


def resolve_checkpoint(path: str, revision: str, files: Sequence[str] = HUB_FILES) -> Path:
    """Return the directory of ``model.path``: a directory, 'demo', one made for a GGUF file, or a hub id's download.

    files: patterns of the files that are downloaded.
    Raises WeightsError, in one sentence, if there is none.
    """
    directory = Path(path).expanduser()
    if path and directory.is_dir():
        return directory.resolve()
    if path == DEMO:
        return _demo_directory()
    if path and directory.exists():
        if directory.suffix == SUFFIX:
            return unfold(directory)
        raise WeightsError(f"{path}: is a file, expected a checkpoint directory or a {SUFFIX} file")
    if is_hub_id(path):
        return _download(path, revision, files)
    if address := HUB_ADDRESS.match(path):
        raise WeightsError(f"{path}: is the address of a page; name a model of the hub as {address[1]!r}")
    raise WeightsError(
        f"{path!r}: no such directory or file; expected a checkpoint directory, a {SUFFIX} file, a hub id 'org/name', "
        "or 'demo'"
    )


def is_hub_id(path: str) -> bool:
    """Return whether ``resolve_checkpoint`` looks for it on the hub: it is 'org/name', and no local path."""
    named = HUB_ID.fullmatch(path) is not None and ".." not in path and not path.endswith(SUFFIX)
    return named and not Path(path).exists()


def read_spec(
    directory: Path,
    read_shape: Callable[[str, Fields], DecoderShape],
    score_tokens: tuple[str, ...] = (),
    token_id: Callable[[str], int] = int,
    features: Iterable[CheckpointFeature] = (),
) -> ModelSpec:
    """Read config.json and generation_config.json.  Raises WeightsError naming the file, field and expectation.

    read_shape: returns the shape for an architecture's name and config.json.
    score_tokens, token_id: see ``Reading``.  features: read the rest."""
    whole = read_fields(directory / "config.json")
    architecture, fields = read_text_part(_architecture(whole), whole)
    quantization = read_quantization(fields)
    reading = Reading(
        directory=directory,
        architecture=architecture,
        fields=fields,
        shape=read_shape(architecture, fields),
        use=GENERATING,
        score_tokens=score_tokens,
        token_id=token_id,
    )
    for feature in features:
        reading = feature.read(reading)
    shape = reading.shape
    if quantization is not None and quantization.method == MXFP4:
        shape = shape.with_experts(upright=True)
    if shape.task_head is not None and reading.use == GENERATING:
        raise WeightsError(f"{directory}: {architecture} generates no text, and nothing here serves its labels")
    if quantization is not None and quantization.method != MXFP4 and shape.unlike_rounded:
        expected = f"none: {architecture} has {shape.unlike_rounded}, which is read only if it is not rounded"
        raise fields.error("quantization_config", str(quantization), expected)
    path = directory / "generation_config.json"
    generation = read_fields(path) if path.exists() else Fields({}, str(path))
    sources = (fields, generation)
    eos_token_ids = {one for source in sources for one in _token_ids(source, "eos_token_id", shape.vocab_size)}
    return ModelSpec(
        directory=directory,
        architecture=architecture,
        shape=shape,
        dtype=_dtype(fields),
        quantization=quantization,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        sampling=_sampling(generation),
        config=whole.table,
        use=reading.use,
    )


def _demo_directory() -> Path:
    places = [
        Path(__file__).resolve().parents[2] / "examples" / "demo_model",
        Path(sys.prefix) / "share" / "callboard" / "demo_model",
    ]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise WeightsError(f"demo: the demo model is not installed; looked in {' and '.join(map(str, places))}")


def _download(hub_id: str, revision: str, files: Sequence[str]) -> Path:
    # Imported here: it takes 0.3 s and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{hub_id}{'@' + revision if revision else ''}"
    try:
        return Path(
            snapshot_download(hub_id, revision=revision or None, allow_patterns=[*files], ignore_patterns=HUB_COPIES)
        )
    except GatedRepoError:
        reason = "access to it must be granted on the hub first; then set HF_TOKEN"
    except RevisionNotFoundError:
        reason = "the hub has no such revision of it"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "neither a directory here nor a model on the hub (private ones need HF_TOKEN)"
    except Exception as error:
        # The hub client's errors without a network have changed with every major version.
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"no such directory here, and the hub could not be reached ({first_line[:120]})"
    raise WeightsError(f"{where}: {reason}")


def _architecture(fields: Fields) -> str:
    names = fields.table.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", names, "a list with the name of the model class")
    return names[0]


def _token_ids(fields: Fields, name: str, vocab_size: int) -> list[int]:
    """Return a field's ids in the vocabulary; the model cannot produce others, and transformers ignores them."""
    token_ids = fields.integers(name)
    if unknown := [one for one in token_ids if one >= vocab_size]:
        shown = ", ".join(map(str, unknown[:MAX_SHOWN_IDS]))
        num, last = len(unknown), vocab_size - 1
        log.warning("%s: %s has %d ids past the model's last, %d; ignored: %s", fields.origin, name, num, last, shown)
    return [one for one in token_ids if one < vocab_size]


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(name, dtype, f"one of {', '.join(DTYPES)}")
    return dtype


def _sampling(fields: Fields) -> SamplingDefaults:
    def number(name: str) -> float | None:
        return fields.number(name) if fields.has(name) else None

    # Some files have a temperature of 0 for greedy, so 0 is allowed for this field alone.
    greedy = fields.table.get("temperature") in (0, 0.0)
    return SamplingDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_k=fields.integer("top_k", minimum=0) if fields.has("top_k") else None,
        top_p=number("top_p"),
        repetition_penalty=number("repetition_penalty"),
    )
