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
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoints.gguf_families import (
    BY_ARCHITECTURE,
    CONVOLUTIONS,
    EPS,
    FAMILIES,
    FIELDS,
    FLAT,
    NAMES,
    OPTIONAL,
    OTHER_EPS,
    ROWS,
    SIGMOID,
    GGUFFamily,
)
from engine.checkpoints.gguf_header import GGUFHeader, GGUFTensor
from engine.checkpoints.gguf_layered import layered_settings
from engine.checkpoints.gguf_parts import model_name, part_paths, read_header
from engine.checkpoints.gguf_rotary import DIVISORS, LONG, SHORT, rotary_settings
from engine.checkpoints.gguf_tokenizer import tokenizer_files
from engine.checkpoints.shards import StoredTensor, read_shards
from engine.host.cache_folder import cache_folder
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

LINK = "model.gguf"
SUFFIX = ".gguf"
TABLE = "gguf_tensors.json"
GLM_TOKENS = 154_880  # GLM-4.7-Flash is the only one of its architecture with this vocabulary
KIMI_ENDS = ("<|im_end|>", "[EOS]", "[EOT]")
UNFOLDING = 10  # part of the directory's name: raise it when its content changes
STORED_FORMATS = "stored_formats"  # field of config.json: types of matrices in blocks, by ggml's names
FLOATS = {"F64", "F32", "F16", "BF16"}
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(\.weight|\.bias|)")
HALVES = re.compile(r"(\w+)\|(\w+)")


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
            what = f"{size} bytes, but its tensors need more; it was changed while it was read"
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
    behind = tuple(f"{tensor.name.partition('.nextn.')[0]}." for tensor in tensors if ".nextn." in tensor.name)
    for tensor in tensors:
        if tensor.name in (DIVISORS, SHORT, LONG):
            continue  # part of the configuration
        path, found = paths[tensor.part], TENSOR.fullmatch(tensor.name)
        own_name = None if found is None else names.get(f"{found[2]}{found[3]}")
        if found is None or (own_name is None and found[2] not in names):
            raise WeightsError(f"{path}: tensor {tensor.name!r} is not known")
        layer = "" if found[1] is None else f"{family.layers}.{found[1]}."
        if family.predictor and tensor.name.startswith(behind):
            layer = "" if ".nextn." in tensor.name else f"{family.predictor}."
        name = layer + (own_name or f"{names[found[2]]}{found[3]}")
        parts = _experts(path, tensor, name) if "#" in name else {name: _shaped(tensor, f"{found[2]}{found[3]}")}
        for own, part in parts.items():
            named[own] = (StoredTensor(path, own, "F32", part.shape, part.num_bytes), part)
    return named


def _shaped(tensor: GGUFTensor, name: str) -> GGUFTensor:
    """Return a tensor in the shape that the model has.  name: without its layer."""
    shape = tensor.shape
    if name in FLAT:
        shape = (prod(shape),)
    elif name in ROWS:  # llama-quantize leaves out axes of 1
        shape = (1, prod(shape))
    elif name in CONVOLUTIONS:
        shape = (prod(shape[:-1]), 1, shape[-1])
    return msgspec.structs.replace(tensor, shape=shape)


def _experts(path: Path, stack: GGUFTensor, name: str) -> dict[str, GGUFTensor]:
    """Return the matrices or biases of each expert, or head, of a stack.  name: as in ``GGUFFamily.names``."""
    halves = HALVES.search(name)
    names = [name.replace(halves[0], one) for one in halves.groups()] if halves else [name]
    if len(stack.shape) != (2 if stack.name.endswith(".bias") else 3) or stack.shape[1] % len(names):
        raise WeightsError(f"{path}: tensor {stack.name!r} has shape {list(stack.shape)}, expected a matrix per expert")
    num_bytes = stack.num_bytes // (stack.shape[0] * len(names))
    shape = (stack.shape[1] // len(names), *stack.shape[2:])
    owns = [one.replace("#", str(number)) for number in range(stack.shape[0]) for one in names]
    return {
        own: msgspec.structs.replace(stack, shape=shape, offset=stack.offset + place * num_bytes, num_bytes=num_bytes)
        for place, own in enumerate(owns)
    }


def _family(path: Path, header: GGUFHeader) -> tuple[str, GGUFFamily]:
    """Return general.architecture and its family."""
    name = header.value("general.architecture")
    if name not in tuple(FAMILIES):  # a tuple, as the value may be unhashable
        expected = ", ".join(one for one in FAMILIES if " " not in one)
        raise WeightsError(f"{path}: general.architecture is {name!r}, expected one of {expected}")
    experts, window = (header.value(f"{name}.{key}") for key in ("expert_count", "attention.sliding_window"))
    kinds = {"with a temperature": header.value(f"{name}.attention.temperature_scale")}
    kinds |= {"with experts": experts, "with 128 experts": experts == 128, "with a window": window}
    kinds["with 256 experts"] = experts == 256
    kinds["with 154880 tokens"] = header.value(f"{name}.vocab_size") == GLM_TOKENS
    # Files of models whose config.json leaves the function out do so, too; only sigmoids have a correction.
    gating = header.value(f"{name}.expert_gating_func")
    corrected = any(".exp_probs_b." in one.name for one in header.tensors)
    kinds["with sigmoids"] = corrected if gating is None else gating == SIGMOID
    others = [FAMILIES[f"{name} {words}"] for words, there in kinds.items() if there and f"{name} {words}" in FAMILIES]
    family = others[0] if others else FAMILIES[name]
    if experts and "expert_count" not in family.fields:
        raise WeightsError(f"{path}: {name}.expert_count is {experts}, expected none: this family is read without")
    return name, family


def _config(paths: Sequence[Path], header: GGUFHeader) -> dict[str, Any]:
    """Return a config.json for the model.  Raises WeightsError for a value that the tables here do not have."""
    path, value = paths[0], header.value
    prefix, family = _family(path, header)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {"hidden_act": "silu"} | dict(family.settings)
    optional = OPTIONAL | {EPS} if OTHER_EPS in family.fields else OPTIONAL
    for key, name in {**FIELDS, **family.fields}.items():
        seen = value(f"{prefix}.{key}")
        if (seen := value(key) if seen is None else seen) is not None:
            config[name] = seen
        elif key in FIELDS and key not in optional and name not in config:
            raise WeightsError(f"{path}: {prefix}.{key} is missing")
    for key, expected in family.needs.items():
        if (seen := value(f"{prefix}.{key}")) not in (None, expected):
            raise WeightsError(f"{path}: {prefix}.{key} is {seen}, expected {expected}: others are not read")
    tensors = _named(paths, header.tensors, family)
    table = tensors.get(f"{family.embedding}.weight")
    if table is None or len(table[0].shape) != 2:
        raise WeightsError(f"{path}: there is no matrix 'token_embd.weight'")
    config["vocab_size"] = table[0].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if family.scaled_head and config["tie_word_embeddings"]:
        what = "its weights have the factor of logits, which is nowhere else; serve the safetensors checkpoint"
        raise WeightsError(f"{path}: there is no matrix 'output.weight', expected one: {what}")
    for field, end in {"attention_bias": f"self_attn.{family.bias}.bias", **family.present}.items():
        config[field] = any(name.endswith(f".{end}") for name in tensors)
    if any(name.endswith(".self_attn.k_b_proj.0.weight") for name in tensors):
        config["split_kv_b_proj"] = True
    config |= _layers(prefix, header, family, config)
    window = value(f"{prefix}.attention.sliding_window")
    if window is not None and "attention.sliding_window" not in family.fields:
        raise WeightsError(f"{path}: {prefix}.attention.sliding_window is {window}, expected none")
    if family.by_width:
        width = config["hidden_size"] // config["num_attention_heads"]
        wide = config["num_hidden_layers"] == family.by_width
        config["query_pre_attn_scalar"] = width if wide else config.get("head_dim", width)
    if family.layered:
        config |= layered_settings(path, prefix, header, config, {name: one for name, (one, _) in tensors.items()})
    else:
        config[family.rotary] = rotary_settings(path, prefix, header, family, config)
    config["eos_token_id"] = _ends(header, family)
    kinds = {tensor.kind for _, tensor in tensors.values() if len(tensor.shape) == 2}
    config[STORED_FORMATS] = sorted(kinds - FLOATS)
    halves = {"F16": "float16", "BF16": "bfloat16"}
    config["dtype"] = halves.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    return config


def _ends(header: GGUFHeader, family: GGUFFamily) -> list[int]:
    """Return the tokens that end a text, a turn or a call of a tool."""
    tokens = header.value("tokenizer.ggml.tokens")
    ends = [header.value(f"tokenizer.ggml.{one}_token_id") for one in ("eos", "eot", "eom")]
    turns = KIMI_ENDS if header.value("tokenizer.ggml.pre") == "kimi-k2" else ()  # which these files do not say
    ends += [tokens.index(one) for one in (*family.ends, *turns) if isinstance(tokens, list) and one in tokens]
    return [one for one in dict.fromkeys(ends) if one is not None]


def _layers(prefix: str, header: GGUFHeader, family: GGUFFamily, config: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers without those behind the last, and which ones have a window or no attention."""
    number, behind = config.get("num_hidden_layers"), header.value(f"{prefix}.nextn_predict_layers")
    found: dict[str, Any] = {}
    field = family.fields.get("attention.head_count_kv", "num_key_value_heads")
    heads, widths = config.get(field), config.get("intermediate_size")
    if family.kinds and isinstance(heads, list) and heads and all(isinstance(one, int) for one in heads):
        found["layer_types"] = [family.kinds[one > 0] for one in heads]
        found[field] = max(heads)
        if len(family.kinds) > 2 and isinstance(widths, list) and len(widths) == len(heads):
            found["intermediate_size"] = max(widths)
            for layer in (layer for layer, width in enumerate(widths) if width):
                found["layer_types"][layer] = family.kinds[2]
    if header.value(f"{prefix}.rope.scaling.finetuned"):
        found["position_embedding_type"] = "rope"  # Granite's hybrids have none without it
    both, turned = config.get("qk_head_dim"), config.get("qk_rope_head_dim")
    if isinstance(both, int) and isinstance(turned, int):
        found["qk_nope_head_dim"] = both - turned
    if isinstance(number, int) and isinstance(behind, int):
        found["num_hidden_layers"] = number - behind
    recurrent = header.value(f"{prefix}.attention.recurrent_layers")
    if family.kinds and isinstance(recurrent, list):
        found["layer_types"] = [family.kinds[not one] for one in recurrent][: found.get("num_hidden_layers")]
    pattern = header.value(f"{prefix}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    if config.get("sliding_window") == 0:
        found["sliding_window"] = None
    return found
