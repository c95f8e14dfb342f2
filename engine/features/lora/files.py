"""LoRA adapters (Hu et al. 2021) as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Owns: which adapters are served, their checks, their digest.  Does not know: torch, names in the API, executors.
An adapter adds scale * B A x to a module's output, with A [rank, inputs] and B [outputs, rank].
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from engine.checkpoints.fields import LARGEST, Fields, read_fields
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    GatedAttentionShape,
    GatedShape,
    MatrixRows,
    MLPShape,
    PartShape,
    RecurrentShape,
    ScaledGatedShape,
)
from engine.checkpoints.shards import StoredTensor, read_header
from engine.types.errors import ConfigError, WeightsError
from engine.types.prompt import RequestPart

NAME = "lora"  # of parts of messages
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
FLOATS = ("F32", "BF16", "F16")
# Further settings of an adapter, with the values at which they have no effect.
UNSERVED = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
}


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter, identified by its content rather than its name.

    digest: SHA-256 of its files, in hex.  path: its directory, absolute."""

    digest: str
    path: str

    @classmethod
    def of(cls, part: RequestPart) -> "Adapter":
        """Return the adapter that a request's part names."""
        return cls(part.digest, part.data.decode())

    @property
    def parts(self) -> dict[str, RequestPart]:
        """The parts of a request that reads it."""
        return {NAME: RequestPart(self.digest, self.path.encode())}


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """The slot that a new row reads.  adapter: what the slot gets before, unless it has it.

    is_read: every rank has answered that it has read the adapter, and keeps it for this step."""

    row: int
    slot: int
    adapter: Adapter | None = None
    is_read: bool = False


class Product(NamedTuple):
    """One product of a layer.  rows: of modules with the same input, which have their whole names."""

    inputs: int
    rows: tuple[MatrixRows, ...]


class AdapterRules(msgspec.Struct, frozen=True):
    """The adapters that are served.

    folder: absolute; adapters elsewhere are not read.  modules: name -> (outputs, inputs) of adaptable modules.
    others: what transformers calls a module -> its name, where that is another one."""

    folder: str
    max_rank: int
    modules: dict[str, tuple[int, int]]
    others: dict[str, str] = msgspec.field(default_factory=dict)

    def module(self, name: str) -> str:
        """Return a module's name for the one that a file has."""
        return self.others.get(name, name)


def layer_products(shape: DecoderShape, index: int) -> tuple[tuple[Product, ...], ...]:
    """Return the products that adapters may change in a layer's attention, recurrent part and MLP, in the order of
    linear layers."""
    layer, prefix, size = shape.layers[index], f"{shape.names.layers}.{index}", shape.hidden_size
    return (
        _of_attention(layer.attention, prefix, size),
        _of_recurrent(layer.recurrent, prefix, size),
        _of_mlp(layer.mlp, prefix, size),
    )


def _of_attention(one: PartShape | None, prefix: str, size: int) -> tuple[Product, ...]:
    kinds = (AttentionShape.built_by, GatedAttentionShape.built_by)
    if not isinstance(one, AttentionShape) or one.built_by not in kinds or one.transposed:
        return ()
    gate = (_product(prefix, one.name, size, one.gate),) if isinstance(one, GatedAttentionShape) else ()
    output = _product(prefix, one.name, one.num_heads * one.head_size, MatrixRows(one.output, size))
    return _product(prefix, one.name, one.input_size or size, *one.inner), *gate, output


def _of_recurrent(one: RecurrentShape | None, prefix: str, size: int) -> tuple[Product, ...]:
    if one is None or not one.inner:
        return ()
    name, inputs = one.outer
    between = (_product(prefix, one.name, *way) for way in one.between)
    first, last = (
        _product(prefix, one.name, size, *one.inner),
        _product(prefix, one.name, inputs, MatrixRows(name, size)),
    )
    return first, *between, last


def _of_mlp(one: PartShape | None, prefix: str, size: int) -> tuple[Product, ...]:
    if isinstance(one, GatedShape) and one.built_by in (GatedShape.built_by, ScaledGatedShape.built_by):
        first = _product(prefix, one.name, size, *one.inner)
    elif isinstance(one, MLPShape) and one.built_by == MLPShape.built_by and not one.transposed:
        first = _product(prefix, one.name, size, MatrixRows(one.up, one.intermediate_size))
    else:
        return ()
    return first, _product(prefix, one.name, one.intermediate_size, MatrixRows(one.down, size))


def _product(prefix: str, part: str, inputs: int, *rows: MatrixRows) -> Product:
    names = (".".join(name for name in (prefix, part, one.name) if name) for one in rows)
    return Product(inputs, tuple(replace(one, name=name) for one, name in zip(rows, names, strict=True)))


def adaptable_modules(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of every module that adapters may change."""
    return {
        rows.name: (rows.height, product.inputs)
        for index in range(shape.num_layers)
        for part in layer_products(shape, index)
        for product in part
        for rows in product.rows
    }


def adapter_rules(shape: DecoderShape, folder: str, max_rank: int, numerics: str) -> AdapterRules:
    """Return a model's rules.  Raises ConfigError if it takes no adapters."""
    fault = ""
    if shape.built_by != DecoderShape.built_by:
        fault = "models that transformers computes, or whose heads differ by layer, take no adapters; leave it empty"
    elif numerics == "invariant":
        fault = "adapters do not work with model.numerics=invariant: their sums depend on the batch; set it to fast"
    elif not (modules := adaptable_modules(shape)):
        fault = "no layer of this model takes adapters: its matrices are transposed, latents or experts"
    elif not Path(folder).is_dir():
        fault = "no such directory; expected the parent of the adapters"
    if fault:
        raise ConfigError(f"lora.folder={folder}: {fault}")
    others = {other: name for name in modules for other in shape.names.spellings(name)[1:]}
    return AdapterRules(str(Path(folder).resolve()), max_rank, modules, others)


def read_adapter(folder: Path, rules: AdapterRules) -> Adapter:
    """Check everything of an adapter but its numbers.  Raises WeightsError naming the file and the fault."""
    fields = read_fields(folder / CONFIG)
    _check_config(fields)
    tensors = read_header(folder / TENSORS)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, rules)
    modules = {match[1] for name in tensors if (match := TENSOR_NAME.fullmatch(name))}
    if not modules:
        raise WeightsError(f"{folder / TENSORS}: holds no tensors, expected lora_A and lora_B of some modules")
    for module in sorted(modules):
        if (own := rules.module(module)) != module and own in modules:
            raise WeightsError(f"{folder / TENSORS}: {module} and {own} are names of one module; keep one of the two")
        ranks = []
        for matrix, dim in (("A", 0), ("B", 1)):
            name = tensor_name(module, matrix)
            if name not in tensors:
                raise WeightsError(
                    f"{folder / TENSORS}: tensor {name!r} is missing, but the other of its pair is there"
                )
            ranks.append(tensors[name].shape[dim])
        if ranks[0] != ranks[1]:
            raise WeightsError(f"{folder / TENSORS}: {module}: lora_A has rank {ranks[0]}, lora_B has {ranks[1]}")
        module_scale(fields, module, ranks[0])
    return Adapter(digest_of(*read_files(folder)), str(folder))


def tensor_name(module: str, matrix: str) -> str:
    """Return the tensor name of a module's matrix 'A' or 'B', in PEFT's spelling."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def module_scale(fields: Fields, module: str, rank: int) -> float:
    """Return the factor of B A x: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023).  Raises WeightsError."""
    patterns = fields.section("alpha_pattern").table
    alpha: object = fields.number("lora_alpha", 8.0)
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        except re.error as error:
            raise WeightsError(f"{fields.origin}: alpha_pattern has {pattern!r:.80}, not a pattern: {error}") from None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST:
        raise fields.error("alpha_pattern", patterns, "numbers")
    return alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """Return an adapter's configuration and its tensors.  Raises WeightsError."""
    try:
        return (folder / CONFIG).read_bytes(), (folder / TENSORS).read_bytes()
    except OSError as error:
        raise WeightsError(f"{error.filename}: {error.strerror or error}") from None


def digest_of(config: bytes, tensors: bytes) -> str:
    """Return the SHA-256 of both files, in hex."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(tensors)
    return digest.hexdigest()


def _check_config(fields: Fields) -> None:
    table: Mapping[str, object] = fields.table
    if table.get("peft_type") != "LORA":
        raise fields.error("peft_type", table.get("peft_type"), '"LORA"; other kinds of adapters are not served')
    for name, neutral in UNSERVED.items():
        value = table.get(name)
        if value is not None and value not in neutral:
            expected = f"{json.dumps(neutral[0])} or nothing; other values are not served"
            raise fields.error(name, value, expected)


def _check_tensor(name: str, tensor: StoredTensor, rules: AdapterRules) -> None:
    where = f"{tensor.file}: tensor {name!r}"
    match = TENSOR_NAME.fullmatch(name)
    if match is None:
        raise WeightsError(f"{where}: not served; expected lora_A and lora_B of linear layers, as PEFT names them")
    module, matrix = rules.module(match[1]), match[2]
    if module not in rules.modules:
        kinds = ", ".join(sorted({one.rpartition(".")[2] for one in rules.modules}))
        raise WeightsError(f"{where}: adapters of this model may change {kinds} of its layers, not {module}")
    if tensor.dtype not in FLOATS:
        raise WeightsError(f"{where}: dtype {tensor.dtype}, expected one of {', '.join(FLOATS)}")
    outputs, inputs = rules.modules[module]
    if len(tensor.shape) != 2:
        raise WeightsError(f"{where}: shape {list(tensor.shape)}, expected a matrix")
    rank, size = tensor.shape if matrix == "A" else tensor.shape[::-1]
    expected = inputs if matrix == "A" else outputs
    if size != expected:
        form = f"[rank, {expected}]" if matrix == "A" else f"[{expected}, rank]"
        raise WeightsError(f"{where}: shape {list(tensor.shape)}, expected {form}: it is another model's adapter")
    if not 1 <= rank <= rules.max_rank:
        raise WeightsError(f"{where}: rank {rank}, expected 1 to {rules.max_rank}; an operator can raise lora.max_rank")
