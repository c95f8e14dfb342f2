"""Every hook callboard asks, when it asks, and what to return.  Authors import from ``callboard.plugins``.

A plugin is a module with functions marked ``@hookimpl``, published under the entry-point group
``callboard`` with a name ``<kind>.<name>`` (for example ``attention.mykernel``).  It is imported only when the
configuration chooses it, and says for which version of this page it was written: ``CALLBOARD_PLUGIN = {"api": 1}``,
see ``engine/plugins/declaration.py`` for what else it may say.  Constructor hooks are asked once, at start; they are
never called inside a step.  Observer hooks are told what has happened, in batches, between steps.
Every context has ``options``, the plugin's own table from the configuration.  ``docs/plugins.md`` has an example of
each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from engine.checkpoints.fields import Fields
    from engine.checkpoints.shape import DecoderShape
    from engine.graphs.passes import GraphPass
    from engine.kv.events import KVEvent
    from engine.kv.eviction import EvictionStrategy
    from engine.kv.store import KVStore
    from engine.layers.attention import AttentionFactory
    from engine.layers.comm import Comm
    from engine.layers.packing import LinearKernel
    from engine.scheduling.meter import RequestMetrics
    from engine.scheduling.policy import SchedulingPolicy
    from engine.scheduling.proposer import DraftModel, Proposer
    from engine.text.grammar import GrammarEngine
    from engine.text.processors import LogitsProcessor
    from engine.text.reasoning import ReasoningFormat
    from engine.text.tool_calls import ToolFormat

PROJECT = "callboard"
# The version of everything on this page and of the protocols it names; docs/plugins.md says what it promises.
API_VERSION = 1
OLDEST_API_VERSION = 1  # what plugins may still be written for

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What an attention plugin is told.  device: 'cpu' or 'cuda'.  dtype: 'float32', 'bfloat16', 'float16'.
    window: sliding window in tokens, 0 for none.  phases: what it is to serve, 'prefill', 'decode' or both.
    needs: what the model's attention has beside that, of what ``Declaration.supports`` may name.
    kv_layout: of the pool, 'layer_first' or 'page_first'; '' if that is not known yet.
    kv_dtype: what the pool's pages keep instead of dtype: 'float32', 'bfloat16', 'float16', 'int8' or 'fp8_e4m3';
    '' for dtype.
    invariant: whether a token's result must have the same bits in every step, see ``Declaration.invariant``."""

    device: str
    dtype: str
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 0
    phases: tuple[str, ...] = ("prefill", "decode")
    needs: tuple[str, ...] = ()
    kv_layout: str = ""
    kv_dtype: str = ""
    invariant: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a model family is told.  architecture: the first of ``architectures`` in config.json.
    fields: all of config.json, read field by field."""

    architecture: str
    fields: "Fields"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommContext:
    """What a communication plugin is told.  device: 'cpu' or 'cuda'; on a GPU the rank's own is the current one.
    rendezvous: URL where this group's ranks, and nobody else, meet: file:///path, tcp://host:port or
    env:///name; empty for one rank."""

    rank: int
    size: int
    device: str
    rendezvous: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinearContext:
    """What a linear plugin is told.  device: 'cpu' or 'cuda'.  dtype: of inputs and outputs, 'float32', 'bfloat16' or
    'float16'.  quantization: what it is to keep weights in, 'none' for what rounds no more than products in dtype do.
    checkpoint_dtype: what the weights were saved in; their values fit it exactly.
    scale_block: (outputs, inputs) that share a scale in a checkpoint in float8, 0 for all; None for another one.
    instruction_sets: of this CPU, of 'avx2', 'avx512' and 'amx'; None if they are not known.
    traced: whether a compiler will trace products.  invariant: whether a row's result must have the same bits whatever
    other rows there are."""

    device: str
    dtype: str
    quantization: str = "none"
    checkpoint_dtype: str = ""
    instruction_sets: tuple[str, ...] | None = None
    traced: bool = False
    invariant: bool = False
    scale_block: tuple[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What an eviction plugin is told."""

    page_size: int
    num_pages: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVStoreContext:
    """What a store of KV pages is told.  record_bytes: the size of each record.  namespace: hex, the same for everybody
    whose records may be shared; their names differ from all others' anyway.  rank, size: of the rank's group."""

    record_bytes: int
    namespace: str
    rank: int = 0
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a scheduling policy is told.  max_running: most requests that run at once."""

    max_running: int
    page_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer is told.  vocab_size: of the model.  max_len: most tokens of a sequence."""

    vocab_size: int
    max_len: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a grammar plugin is told.  pieces: every token's bytes, by id; of special ones their names.
    vocab_size: of the model, which may be larger.  eos_token_ids: what ends an output."""

    vocab_size: int
    pieces: "Sequence[bytes]"
    special_token_ids: "Sequence[int]"
    eos_token_ids: "Sequence[int]"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a tool parser or reasoning parser plugin is told.  template: the model's chat template, empty for none."""

    template: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """What an observer is told.  page_size: tokens per page, and so per hash of a KV event."""

    page_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """What a logits processor is told.  vocab_size: how many logits a row has."""

    vocab_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphPassContext:
    """What a graph pass is told.  device: 'cpu' or 'cuda'.  dtype: the model's, 'float32', 'bfloat16', 'float16'."""

    device: str
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)


# ---- constructors: exactly one plugin of each kind is chosen, and answers -----------------------


@hookspec(firstresult=True)
def callboard_attention_backend(context: AttentionContext) -> "AttentionFactory | None":
    """Say how to build the attention backend of one rank.

    Called: once per executor, before the KV pool is allocated.
    Returns: a callable (spec, pool) -> AttentionBackend, see ``engine/layers/attention.py``.
    Raises: PluginError if it cannot run with this device, dtype, head size or page size.
    """


@hookspec(firstresult=True)
def callboard_model(context: ModelContext) -> "DecoderShape | None":
    """Say what a checkpoint's model is made of, by its config.json.

    A plugin names the architectures that it is asked for in ``CALLBOARD_PLUGIN["architectures"]``.
    Called: in every process that needs to know the model, before weights are read; no torch, no device.
    Returns: a DecoderShape, see ``engine/checkpoints/shape.py``; its parts may be the plugin's own.
    Raises: WeightsError, as ``fields.error`` makes it, naming the field that cannot be served.
    """


@hookspec(firstresult=True)
def callboard_comm(context: CommContext) -> "Comm | None":
    """Build the communicator of one rank's tensor-parallel group.

    Called: once per executor, before weights are loaded.
    Returns: a Comm, see ``engine/layers/comm.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_linear(context: LinearContext) -> "LinearKernel | None":
    """Build what lays the weights of linear layers out and multiplies by them.

    Called: once per executor for the layers and perhaps once for the LM head, before weights are loaded.
    Returns: a LinearKernel, see ``engine/layers/packing.py``.
    Raises: PluginError if it cannot run with this device, dtype or quantization.
    """


@hookspec(firstresult=True)
def callboard_eviction_strategy(context: EvictionContext) -> "EvictionStrategy | None":
    """Build the strategy that decides which cached pages go first when the pool is full.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: an EvictionStrategy, see ``engine/kv/eviction.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_kv_store(context: KVStoreContext) -> "KVStore | None":
    """Build what keeps KV pages beyond the pool, and maybe beyond the process.

    Called: once per executor, when its KV pool is there.
    Returns: a KVStore, see ``engine/kv/store.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_scheduling_policy(context: PolicyContext) -> "SchedulingPolicy | None":
    """Build the policy that decides who of those that wait runs first.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: a SchedulingPolicy, see ``engine/scheduling/policy.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_proposer(context: ProposerContext) -> "Proposer | DraftModel | None":
    """Build what guesses how sequences go on, so that one step can verify several tokens.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: a Proposer, or a DraftModel for the executors, see ``engine/scheduling/proposer.py``.
    Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_grammar_engine(context: GrammarContext) -> "GrammarEngine | None":
    """Build what compiles grammars and says which tokens they allow next, for structured output.

    Called: once per process, in a worker thread, when the first request needs it; no torch, no device.
    Returns: a GrammarEngine, see ``engine/text/grammar.py``.  Raises: PluginError if its options are wrong.
    """


# ---- graph passes: as many as the configuration names, in its order -------------------------------


@hookspec(firstresult=True)
def callboard_graph_pass(context: GraphPassContext) -> "GraphPass | None":
    """Build what changes the model's traced pieces before they are compiled, with graphs.mode=compiled.

    Called: once per executor, before weights are loaded.
    Returns: a GraphPass, see ``engine/graphs/passes.py``.  Raises: PluginError if its options are wrong.
    """


# ---- logits processors: as many as the configuration names, in its order ---------------------------


@hookspec(firstresult=True)
def callboard_logits_processor(context: LogitsProcessorContext) -> "LogitsProcessor | None":
    """Build what changes the logits of requests that name it.

    Called: once per process that reads requests, where torch may be missing, and once per executor.
    Returns: a LogitsProcessor, see ``engine/text/processors.py``.  Raises: PluginError if its options are wrong.
    """


# ---- parsers: one of each kind is chosen, by name or by the chat template -------------------------


@hookspec(firstresult=True)
def callboard_tool_parser(context: ParserContext) -> "ToolFormat | None":
    """Say how the model writes function calls.

    Called: once per process that reads outputs, when the tokenizer is loaded; no torch, no device.
    Returns: a ToolFormat, see ``engine/text/tool_calls.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_reasoning_parser(context: ParserContext) -> "ReasoningFormat | None":
    """Say how the model writes what it thinks before it answers.

    Called: once per process that reads outputs, when the tokenizer is loaded; no torch, no device.
    Returns: a ReasoningFormat, see ``engine/text/reasoning.py``.  Raises: PluginError if its options are wrong.
    """


# ---- observers: as many as the configuration names, in its order ---------------------------------


@hookspec
def callboard_observer(context: ObserverContext) -> object | None:
    """Build what observes, where that takes options or state: an object with the hooks below as its methods.

    A plugin that needs neither leaves this hook out and implements the ones below as functions of its module.
    Called: once per engine, before its actors start; every observer is asked, each with its own options.
    Returns: any object whose methods are marked ``@hookimpl``.  Raises: PluginError if its options are wrong.
    """


@hookspec
def callboard_request_finished(requests: "Sequence[RequestMetrics]") -> None:
    """Requests have ended, in this order: what they cost and how long they took.  Refused ones never began.

    Called: between steps, with all that have ended since the last call; never with none.
    It runs on the scheduler's loop: return at once, and hand what takes time to a queue or thread of your own.
    If it raises, that is logged with the plugin's name and this observer is told nothing any more, in this hook or
    the next one; requests and other observers do not notice.
    """


@hookspec
def callboard_kv_event(events: "Sequence[KVEvent]") -> None:
    """Pages were stored, removed or restored, in this order; see ``engine/kv/events.py``.

    Called: between steps, with all events since the last call; never with none.  Events are recorded, and pages
    hashed, only if some plugin implements this hook.  As above, return at once; raising is treated as above.
    """


@hookspec
def callboard_engine_stopped() -> None:
    """The engine has ended or crashed, and nothing will be told any more: flush, and release what is held.

    Called: once, also for an observer that has raised before.
    """
