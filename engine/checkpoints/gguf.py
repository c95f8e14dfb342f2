"""GGUF files: weights, the model's shape and its tokenizer in one file or its parts, as llama.cpp reads it.

Owns: what of a file is read, and its names; a directory for it in Hugging Face format, in the user's cache, whose
``model.gguf`` links to the first file, and which has all that is in the header, so that later starts do not read it.
Does not know: torch, the format of the header, how blocks of numbers are decoded.
"""

import hashlib
import json
import logging
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoints.gguf_families import BY_ARCHITECTURE, FAMILIES, FIELDS, NAMES, OPTIONAL, GGUFFamily
from engine.checkpoints.gguf_header import GGUFHeader, GGUFTensor
from engine.checkpoints.gguf_parts import model_name, part_paths, read_header
from engine.checkpoints.gguf_tokenizer import tokenizer_files
from engine.checkpoints.shards import StoredTensor, read_shards
from engine.host.cache_folder import cache_folder
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

LINK = "model.gguf"
SUFFIX = ".gguf"
TABLE = "gguf_tensors.json"
UNFOLDING = 5  # part of the directory's name: raise it when its content changes
STORED_FORMATS = "stored_formats"  # field of config.json: types of matrices in blocks, by ggml's names
FLOATS = {"F64", "F32", "F16", "BF16"}
DIVISORS = "rope_freqs.weight"  # divisors of rotary frequencies: llama.cpp's form of the type llama3
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def unfold(path: Path) -> Path:
    """Return the directory for a GGUF file; make it if it is missing.  Raises WeightsError."""
    name, paths = model_name(path), [one.resolve() for one in part_paths(path.absolute())]
    path = paths[0]
    facts = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in paths]
    what = f"{UNFOLDING} {facts}"
    base = cache_folder("gguf")
    if base is None:
        raise WeightsError(f"{path}: no home directory to unfold it in; set XDG_CACHE_HOME")
    directory = base / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    header = read_header(paths)
    files = {"config.json": json.dumps(_config(paths, header), indent=1).encode()}
    files[TABLE] = msgspec.json.encode(header.tensors)
    try:
        files |= tokenizer_files(header)
    except WeightsError as error:  # the weights can be served without it
        log.warning("%s", error)
    try:
        base.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=base))
        for name, content in files.items():
            (partial / name).write_bytes(content)
        for part, one in enumerate(paths):
            (partial / _link(part)).symlink_to(one)
        try:
            partial.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    except OSError as error:
        raise WeightsError(f"{base}: {error.strerror or error}; {path.name} needs a directory there") from None
    return directory


def read_table(directory: Path) -> dict[str, tuple[StoredTensor, GGUFTensor]]:
    """Return the tensors of a directory that ``unfold`` made.  Raises WeightsError."""
    try:
        tensors = msgspec.json.decode((directory / TABLE).read_bytes(), type=list[GGUFTensor])
        num_parts = 1 + max((one.part for one in tensors), default=0)
        paths = [(directory / _link(part)).resolve(strict=True) for part in range(num_parts)]
        family = BY_ARCHITECTURE[json.loads((directory / "config.json").read_bytes())["architectures"][0]]
        sizes = [path.stat().st_size for path in paths]
    except (OSError, ValueError, LookupError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{directory}: the directory of a GGUF file is damaged; remove it: {error}") from None
    for one in tensors:
        if one.offset + one.num_bytes > (size := sizes[one.part]):
            what = f"{size} bytes, but its tensors need more; it was changed while it is read"
            raise WeightsError(f"{paths[one.part]}: {what}")
    return _named(paths, tensors, family)


def _link(part: int) -> str:
    """Return the name of the link to a file of the model."""
    return f"model-{part}{SUFFIX}" if part else LINK


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint of either format, by their names in Hugging Face format.

    Raises WeightsError naming the file and the tensor at fault."""
    if not (directory / LINK).exists():
        return read_shards(directory)
    return {name: tensor for name, (tensor, _) in read_table(directory).items()}


def block_kinds(directory: Path) -> list[str]:
    """Return the types of blocks of a GGUF file's matrices; none for another checkpoint.  Raises WeightsError."""
    if not (directory / LINK).exists():
        return []
    tensors = [tensor for _, tensor in read_table(directory).values()]
    return sorted({one.kind for one in tensors if len(one.shape) > 1} - {"F64", "F32", "F16", "BF16"})


def _named(
    paths: Sequence[Path], tensors: list[GGUFTensor], family: GGUFFamily
) -> dict[str, tuple[StoredTensor, GGUFTensor]]:
    """Return the tensors by their names in Hugging Face format, together with the file's own.

    Their dtype is float32, to which blocks are decoded.  Raises WeightsError for a tensor without such a name."""
    named: dict[str, tuple[StoredTensor, GGUFTensor]] = {}
    names = {**NAMES, **family.names}
    for tensor in tensors:
        if tensor.name == DIVISORS:
            continue  # part of the configuration
        path, found = paths[tensor.part], TENSOR.fullmatch(tensor.name)
        if found is None or found[2] not in names:
            raise WeightsError(f"{path}: tensor {tensor.name!r} is not known")
        layer = "" if found[1] is None else f"model.layers.{found[1]}."
        name = f"{layer}{names[found[2]]}.{found[3]}"
        parts = _experts(path, tensor) if "#" in name else [tensor]
        for number, part in enumerate(parts):
            own = name.replace("#", str(number))
            named[own] = (StoredTensor(path, own, "F32", part.shape, part.num_bytes), part)
    return named


def _experts(path: Path, stack: GGUFTensor) -> list[GGUFTensor]:
    """Return the matrix of each expert of a stack."""
    if len(stack.shape) != 3:
        raise WeightsError(f"{path}: tensor {stack.name!r} has shape {list(stack.shape)}, expected a matrix per expert")
    num_bytes = stack.num_bytes // stack.shape[0]
    return [
        msgspec.structs.replace(
            stack, shape=stack.shape[1:], offset=stack.offset + number * num_bytes, num_bytes=num_bytes
        )
        for number in range(stack.shape[0])
    ]


def _family(path: Path, header: GGUFHeader) -> tuple[str, GGUFFamily]:
    """Return general.architecture and its family."""
    name = header.value("general.architecture")
    if name not in tuple(FAMILIES):  # a tuple, as the value may be unhashable
        expected = ", ".join(one for one in FAMILIES if " " not in one)
        raise WeightsError(f"{path}: general.architecture is {name!r}, expected one of {expected}")
    experts = header.value(f"{name}.expert_count")
    family = FAMILIES.get(f"{name} with experts", FAMILIES[name]) if experts else FAMILIES[name]
    if experts and "expert_count" not in family.fields:
        raise WeightsError(f"{path}: {name}.expert_count is {experts}, expected none: this family is read without")
    return name, family


def _config(paths: Sequence[Path], header: GGUFHeader) -> dict[str, Any]:
    """Return a config.json for the model.  Raises WeightsError for a value that the tables here do not have."""
    path, value = paths[0], header.value
    prefix, family = _family(path, header)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= family.settings
    for key, name in {**FIELDS, **family.fields}.items():
        if (seen := value(f"{prefix}.{key}")) is not None:
            config[name] = seen
        elif key in FIELDS and key not in OPTIONAL:
            raise WeightsError(f"{path}: {prefix}.{key} is missing")
    tensors = _named(paths, header.tensors, family)
    table = tensors.get("model.embed_tokens.weight")
    if table is None or len(table[0].shape) != 2:
        raise WeightsError(f"{path}: there is no matrix 'token_embd.weight'")
    config["vocab_size"] = table[0].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
    config["hidden_act"] = "silu"
    window = value(f"{prefix}.attention.sliding_window")
    if window is not None and "attention.sliding_window" not in family.fields:
        raise WeightsError(f"{path}: {prefix}.attention.sliding_window is {window}, expected none")
    if family.by_width:
        width = config["hidden_size"] // config["num_attention_heads"]
        wide = config["num_hidden_layers"] == family.by_width
        config["query_pre_attn_scalar"] = width if wide else config.get("head_dim", width)
    config[family.rotary] = _rotary(path, prefix, value, _divisors(paths, header))
    ends = (value("tokenizer.ggml.eos_token_id"), value("tokenizer.ggml.eot_token_id"))
    config["eos_token_id"] = [one for one in dict.fromkeys(ends) if one is not None]
    kinds = {tensor.kind for _, tensor in tensors.values() if len(tensor.shape) > 1}
    config[STORED_FORMATS] = sorted(kinds - FLOATS)
    halves = {"F16": "float16", "BF16": "bfloat16"}
    config["dtype"] = halves.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    return config


def _divisors(paths: Sequence[Path], header: GGUFHeader) -> list[float] | None:
    for tensor in header.tensors:
        if tensor.name == DIVISORS:
            path = paths[tensor.part]
            if tensor.kind != "F32":
                raise WeightsError(f"{path}: tensor {DIVISORS!r} has type {tensor.kind}, expected F32")
            with path.open("rb") as file:
                file.seek(tensor.offset)
                return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
    return None


def _rotary(path: Path, family: str, value: Any, divisors: list[float] | None) -> dict[str, Any]:
    theta = value(f"{family}.rope.freq_base")
    kind = value(f"{family}.rope.scaling.type") or "none"
    parameters: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta, "rope_type": "default"}
    if divisors is not None:
        if kind != "none":
            raise WeightsError(f"{path}: {family}.rope.scaling.type is {kind!r}, expected none with {DIVISORS!r}")
        # The same divisors for short and long sequences, and no factor for scores.
        context = value(f"{family}.context_length")
        tables = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        return parameters | {"rope_type": "longrope", "original_max_position_embeddings": context, **tables}
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise WeightsError(f"{path}: {family}.rope.scaling.type is {kind!r}, expected one of none, linear, yarn")
    parameters |= {"rope_type": kind, "factor": value(f"{family}.rope.scaling.factor")}
    if (original := value(f"{family}.rope.scaling.original_context_length")) is not None:
        parameters["original_max_position_embeddings"] = original
    return parameters
