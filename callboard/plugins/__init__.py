"""The one page a plugin imports from: hooks, contexts, errors, and every type that they name.

Owns: which names belong to the plugin API; ``docs/plugins.md`` says what its version promises.  Does not know: plugins.
Names that need torch are imported when they are asked for: a plugin without tensors starts without torch.
The conformance kit is ``callboard.plugins.testing``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import PluginError, RequestError
from engine.kv.events import KVEvent, Tier, namespace_seed
from engine.kv.eviction import Candidate, EvictionStrategy, SortKey
from engine.kv.node import Namespace
from engine.messages import Finish
from engine.params import Grammar
from engine.plugins.hookspecs import (
    API_VERSION,
    AttentionContext,
    CommContext,
    EvictionContext,
    GrammarContext,
    ObserverContext,
    ParserContext,
    PolicyContext,
    hookimpl,
)
from engine.plugins.options import Options, decode_options
from engine.plugins.selection import attention_factory
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.policy import SchedulingPolicy, Waiting
from engine.text.call_reader import CallReader, Reading
from engine.text.grammar import CompiledGrammar, GrammarEngine, GrammarFailure, Mask, Matcher
from engine.text.reasoning import MarkedReasoning, ReasoningFormat, ReasoningParser, Thinking
from engine.text.tool_calls import CallPiece, Part, ToolFormat, ToolParser
from engine.text.tool_format import CallShape, Tool, marked_calls

if TYPE_CHECKING:
    from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
    from engine.layers.comm import Comm
    from engine.layers.kv_pool import KVPool

__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionContext",
    "AttentionFactory",
    "AttentionSpec",
    "CallPiece",
    "CallReader",
    "CallShape",
    "Candidate",
    "Comm",
    "CommContext",
    "CompiledGrammar",
    "EvictionContext",
    "EvictionStrategy",
    "Finish",
    "Grammar",
    "GrammarContext",
    "GrammarEngine",
    "GrammarFailure",
    "KVEvent",
    "KVPool",
    "MarkedReasoning",
    "Mask",
    "Matcher",
    "Namespace",
    "ObserverContext",
    "Options",
    "ParserContext",
    "Part",
    "PluginError",
    "PolicyContext",
    "Reading",
    "ReasoningFormat",
    "ReasoningParser",
    "RequestError",
    "RequestMetrics",
    "SchedulingPolicy",
    "SortKey",
    "Thinking",
    "Tier",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "Waiting",
    "attention_factory",
    "decode_options",
    "hookimpl",
    "marked_calls",
    "namespace_seed",
]

_NEED_TORCH = {"Comm": "engine.layers.comm", "KVPool": "engine.layers.kv_pool"} | dict.fromkeys(
    ("AttentionBackend", "AttentionBatch", "AttentionFactory", "AttentionSpec"), "engine.layers.attention"
)


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'callboard.plugins' has no attribute {name!r}")
