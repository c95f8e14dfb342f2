"""The choice of a checkpoint's reader.

Owns: the choice.  Does not know: how tensors are stored.
"""

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.gguf import LINK
from engine.checkpoints.quantization import MXFP4
from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.shards import StoredTensor, read_shards
from engine.checkpoints.text_part import text_tensors
from engine.formats.gguf import GGUFWeights
from engine.formats.mxfp4 import CodesReader, MXFP4Reader
from engine.formats.quantized import QuantizedReader
from engine.formats.reader import SafetensorsReader, WeightReader


def open_reader(spec: ModelSpec, rounds_experts: bool = False) -> WeightReader:
    """Return a reader of a checkpoint's weights.

    rounds_experts: as in ``QuantizedReader``, for a shape whose experts stay in float8.
    Raises WeightsError naming the file and the tensor at fault."""
    if (spec.directory / LINK).exists():
        return GGUFWeights(spec)
    stored = _with_prefix(spec.shape, text_tensors(spec.config["architectures"][0], read_shards(spec.directory)))
    if spec.quantization is None:
        return SafetensorsReader(stored)
    if spec.quantization.method == MXFP4:
        kept = any(one.four_bits for one in spec.shape.experts)
        return CodesReader(stored) if kept else MXFP4Reader(stored)
    kept = any(one.float8 for one in spec.shape.experts)
    return QuantizedReader(stored, spec.quantization, kept, kept and rounds_experts)


def _with_prefix(shape: DecoderShape, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by the shape's names; a model saved without its head lacks the prefix of the names."""
    table = f"{shape.names.embedding}.weight"
    prefix, _, bare = table.partition(".")
    if table in stored or bare not in stored:
        return stored
    return {f"{prefix}.{name}": tensor for name, tensor in stored.items()}
