"""GGUF files: one file with weights, the model's shape and its tokenizer, as llama.cpp reads it.

Owns: the part of a file that is read, and its names; a directory for it in Hugging Face format, in the user's cache,
whose ``model.gguf`` links to the file.  Does not know: torch, how blocks of numbers are stored (the gguf package does),
the tokenizer, which is written to that directory when it is first read.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoints.shards import StoredTensor, read_shards
from engine.host.cache_folder import cache_folder
from engine.types.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFReader

LINK = "model.gguf"
SUFFIX = ".gguf"
UNFOLDING = 3  # part of the directory's name: raise it when its content changes
STORED_FORMATS = "stored_formats"  # field of config.json: types of matrices in blocks, by ggml's names
# general.architecture -> Hugging Face's name.  llama.cpp treats a Mistral as a Llama.
ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Key below the architecture's name -> field of config.json.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {"attention.head_count_kv", "attention.key_length"}
FLOATS = {"F64", "F32", "F16", "BF16"}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
DIVISORS = "rope_freqs.weight"  # divisors of rotary frequencies: llama.cpp's form of the type llama3
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def open_gguf(path: Path) -> "GGUFReader":
    """Map a file, and return a reader of its metadata and tensors.  Raises WeightsError naming the file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise WeightsError(
            f"{path}: GGUF files are read with the gguf package: pip install 'callboard[gguf]'"
        ) from None

    class Bounded(GGUFReader):  # type: ignore[misc]
        """A reader that stops at the end of a truncated or hostile file."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if not 0 <= int(offset) <= int(offset) + int(count) <= len(self.data):
                raise ValueError(f"{int(count)} values at byte {int(offset)} of {len(self.data)}; it is truncated")
            return super()._get(offset, dtype, count, override_order)

    try:
        return Bounded(path)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a GGUF file that can be read: {error}") from None


def unfold(path: Path) -> Path:
    """Return the directory for a GGUF file; make it if it is missing.  Raises WeightsError."""
    path = path.resolve()
    facts = path.stat()
    what = f"{UNFOLDING} {path} {facts.st_size} {facts.st_mtime_ns}"
    base = cache_folder("gguf")
    if base is None:
        raise WeightsError(f"{path}: no home directory to unfold it in; set XDG_CACHE_HOME")
    directory = base / f"{path.stem}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    reader = open_gguf(path)
    config = _config(path, reader)
    try:
        base.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=base))
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        (partial / LINK).symlink_to(path)
        try:
            partial.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    except OSError as error:
        raise WeightsError(f"{base}: {error.strerror or error}; {path.name} needs a directory there") from None
    return directory


def read_tensors(path: Path, reader: "GGUFReader") -> dict[str, tuple[StoredTensor, Any]]:
    """Return the tensors by their names in Hugging Face format, together with the reader's own.

    Their dtype is float32, to which blocks are decoded.  Raises WeightsError for a tensor without such a name."""
    tensors: dict[str, tuple[StoredTensor, Any]] = {}
    for tensor in reader.tensors:
        if tensor.name == DIVISORS:
            continue  # part of the configuration
        found = TENSOR.fullmatch(tensor.name)
        if found is None or found[2] not in NAMES:
            raise WeightsError(f"{path}: tensor {tensor.name!r} is not known")
        layer = "" if found[1] is None else f"model.layers.{found[1]}."
        name = f"{layer}{NAMES[found[2]]}.{found[3]}"
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[name] = (StoredTensor(path, name, "F32", shape, int(tensor.n_bytes)), tensor)
    return tensors


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint of either format, by their names in Hugging Face format.

    Raises WeightsError naming the file and the tensor at fault."""
    path = directory / LINK
    if not path.exists():
        return read_shards(directory)
    return {name: tensor for name, (tensor, _) in read_tensors(path, open_gguf(path)).items()}


def _config(path: Path, reader: "GGUFReader") -> dict[str, Any]:
    """Return a config.json for the file.  Raises WeightsError for a value that the tables here do not have."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except ValueError as error:
            raise WeightsError(f"{path}: {key} cannot be read: {error}") from None

    family = value("general.architecture")
    if family not in tuple(ARCHITECTURES):  # a tuple, as the value may be unhashable
        expected = ", ".join(ARCHITECTURES)
        raise WeightsError(f"{path}: general.architecture is {family!r}, expected one of {expected}")
    if experts := value(f"{family}.expert_count"):
        raise WeightsError(f"{path}: {family}.expert_count is {experts}, expected none: no mixture of experts is read")
    config: dict[str, Any] = {"architectures": [f"{ARCHITECTURES[family]}ForCausalLM"], "model_type": family}
    for key, name in FIELDS.items():
        if (seen := value(f"{family}.{key}")) is not None:
            config[name] = seen
        elif key not in OPTIONAL:
            raise WeightsError(f"{path}: {family}.{key} is missing")
    tensors = read_tensors(path, reader)
    table = tensors.get("model.embed_tokens.weight")
    if table is None or len(table[0].shape) != 2:
        raise WeightsError(f"{path}: there is no matrix 'token_embd.weight'")
    config["vocab_size"] = table[0].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
    config["hidden_act"] = "silu"
    window = value(f"{family}.attention.sliding_window")
    if family == "mistral":
        config["sliding_window"] = window
    elif window is not None:
        raise WeightsError(f"{path}: {family}.attention.sliding_window is {window}, expected none")
    config["rope_parameters"] = _rotary(path, family, value, _divisors(path, reader))
    ends = (value("tokenizer.ggml.eos_token_id"), value("tokenizer.ggml.eot_token_id"))
    config["eos_token_id"] = [one for one in dict.fromkeys(ends) if one is not None]
    kinds = {tensor.tensor_type.name for _, tensor in tensors.values() if len(tensor.shape) > 1}
    config[STORED_FORMATS] = sorted(kinds - FLOATS)
    halves = {"F16": "float16", "BF16": "bfloat16"}
    config["dtype"] = halves.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    return config


def _divisors(path: Path, reader: "GGUFReader") -> list[float] | None:
    for tensor in reader.tensors:
        if tensor.name == DIVISORS:
            if tensor.tensor_type.name != "F32":
                raise WeightsError(f"{path}: tensor {DIVISORS!r} has type {tensor.tensor_type.name}, expected F32")
            return [float(one) for one in tensor.data.flat]
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
