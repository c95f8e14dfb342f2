"""The module that plugins import from: hooks, contexts, errors, and every type that they name.

Owns: which names belong to the plugin API; ``docs/plugins.md`` says what its version promises.  Does not know: plugins.
Names that need torch are imported on first use: a plugin without tensors starts without torch.
The conformance kit is ``callboard.plugins.testing``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.checkpoints.fields import Fields
from engine.checkpoints.reading import (
    Sizes,
    alike,
    decoder,
    pre_norm,
    read_activation,
    read_gated,
    read_layer_types,
    read_norm,
    read_rotary,
    read_sizes,
    windowed_layers,
)
from engine.checkpoints.shape import (
    AttentionShape,
    ClassifierShape,
    DecoderShape,
    ExpertsShape,
    GatedShape,
    HeadLayerNormShape,
    HeadNormShape,
    LatentAttentionShape,
    LayerNormShape,
    LayerShape,
    MLPShape,
    Names,
    PartShape,
    RewardShape,
    RMSNormShape,
    RotaryShape,
    RouterShape,
    Scaling,
    Unchanged,
    WideHeadNormShape,
)
from engine.kv.events import KVEvent, Tier
from engine.kv.eviction import Candidate, EvictionListener, EvictionStrategy, SortKey
from engine.kv.node import Namespace, namespace_seed
from engine.messages import Finish
from engine.plugins.encoder.encoder import Axes, BatchTower, Encoder, ToEncode, Tower
from engine.plugins.hookspecs import (
    API_VERSION,
    AttentionContext,
    CommContext,
    EncoderContext,
    EvictionContext,
    GrammarContext,
    GraphPassContext,
    KVStoreContext,
    LinearContext,
    LogitsProcessorContext,
    ModelContext,
    ObserverContext,
    ParserContext,
    PolicyContext,
    ProposerContext,
    SnapshotContext,
    TransferContext,
    hookimpl,
)
from engine.plugins.kv_store.store import KVStore
from engine.plugins.options import Options, decode_options
from engine.plugins.selection import attention_factory
from engine.plugins.snapshots.policy import PromptPages, SnapshotPolicy
from engine.plugins.transfer.options import CarrierOptions
from engine.plugins.transfer.transfer import PageCarrier
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.policy import SchedulingPolicy, TenantPolicy, Waiting
from engine.scheduling.proposer import DraftModel, Proposer, ProposerSession
from engine.text.call_reader import CallReader, Reading
from engine.text.film_files import FilmFile
from engine.text.grammar import CompiledGrammar, GrammarEngine, GrammarFailure, Mask, Matcher
from engine.text.picture_files import read_picture
from engine.text.pictures import FilmFormat, PictureFormat, PictureLayout
from engine.text.processors import LogitsProcessor, LogitsRows
from engine.text.reasoning import MarkedReasoning, ReasoningFormat, ReasoningParser, Thinking
from engine.text.tool_calls import CallPiece, OutputPart, ToolFormat, ToolParser
from engine.text.tool_format import CallShape, Tool, ValueShape, marked_calls, written_values
from engine.types.errors import PluginError, RequestError, WeightsError
from engine.types.params import Grammar
from engine.types.prompt import Film

if TYPE_CHECKING:
    from engine.graphs.passes import GraphPass
    from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
    from engine.layers.comm import Comm
    from engine.layers.kernels import LayerKernels
    from engine.layers.kv_pool import KVPool
    from engine.layers.linear import ColumnLinear, Linear, RowLinear
    from engine.layers.packing import LinearKernel, PackedWeight
    from engine.layers.part import FeedForward, Norm, Part
    from engine.layers.task_head import TaskHead
    from engine.layers.weights import WeightSlice

__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionContext",
    "AttentionFactory",
    "AttentionShape",
    "AttentionSpec",
    "Axes",
    "BatchTower",
    "CallPiece",
    "CallReader",
    "CallShape",
    "Candidate",
    "CarrierOptions",
    "ClassifierShape",
    "ColumnLinear",
    "Comm",
    "CommContext",
    "CompiledGrammar",
    "DecoderShape",
    "DraftModel",
    "Encoder",
    "EncoderContext",
    "EvictionContext",
    "EvictionListener",
    "EvictionStrategy",
    "ExpertsShape",
    "FeedForward",
    "Fields",
    "Film",
    "FilmFile",
    "FilmFormat",
    "Finish",
    "GatedShape",
    "Grammar",
    "GrammarContext",
    "GrammarEngine",
    "GrammarFailure",
    "GraphPass",
    "GraphPassContext",
    "HeadLayerNormShape",
    "HeadNormShape",
    "KVEvent",
    "KVPool",
    "KVStore",
    "KVStoreContext",
    "LatentAttentionShape",
    "LayerKernels",
    "LayerNormShape",
    "LayerShape",
    "Linear",
    "LinearContext",
    "LinearKernel",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "LogitsRows",
    "MLPShape",
    "MarkedReasoning",
    "Mask",
    "Matcher",
    "ModelContext",
    "Names",
    "Namespace",
    "Norm",
    "ObserverContext",
    "Options",
    "OutputPart",
    "PackedWeight",
    "PageCarrier",
    "ParserContext",
    "Part",
    "PartShape",
    "PictureFormat",
    "PictureLayout",
    "PluginError",
    "PolicyContext",
    "PromptPages",
    "Proposer",
    "ProposerContext",
    "ProposerSession",
    "RMSNormShape",
    "Reading",
    "ReasoningFormat",
    "ReasoningParser",
    "RequestError",
    "RequestMetrics",
    "RewardShape",
    "RotaryShape",
    "RouterShape",
    "RowLinear",
    "Scaling",
    "SchedulingPolicy",
    "Sizes",
    "SnapshotContext",
    "SnapshotPolicy",
    "SortKey",
    "TaskHead",
    "TenantPolicy",
    "Thinking",
    "Tier",
    "ToEncode",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "Tower",
    "TransferContext",
    "Unchanged",
    "ValueShape",
    "Waiting",
    "WeightSlice",
    "WeightsError",
    "WideHeadNormShape",
    "alike",
    "attention_factory",
    "decode_options",
    "decoder",
    "hookimpl",
    "marked_calls",
    "namespace_seed",
    "pre_norm",
    "read_activation",
    "read_gated",
    "read_layer_types",
    "read_norm",
    "read_picture",
    "read_rotary",
    "read_sizes",
    "windowed_layers",
    "written_values",
]

_NEED_TORCH = {
    "Comm": "engine.layers.comm",
    "GraphPass": "engine.graphs.passes",
    "KVPool": "engine.layers.kv_pool",
    "LayerKernels": "engine.layers.kernels",
    "WeightSlice": "engine.layers.weights",
    **dict.fromkeys(
        ("AttentionBackend", "AttentionBatch", "AttentionFactory", "AttentionSpec"), "engine.layers.attention"
    ),
    **dict.fromkeys(("ColumnLinear", "Linear", "RowLinear"), "engine.layers.linear"),
    "TaskHead": "engine.layers.task_head",
    **dict.fromkeys(("LinearKernel", "PackedWeight"), "engine.layers.packing"),
    **dict.fromkeys(("FeedForward", "Norm", "Part"), "engine.layers.part"),
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'callboard.plugins' has no attribute {name!r}")
