"""Every hook of callboard: when it is called and what it returns.  Authors import from ``callboard.plugins``.

A plugin is a module with functions marked ``@hookimpl``, published under the entry-point group
``callboard`` with a name ``<kind>.<name>`` (for example ``attention.mykernel``).  It is imported only if the
configuration names it.  ``CALLBOARD_PLUGIN = {"api": 1}`` declares the version of this page that it was written for;
``engine/plugins/declaration.py`` lists the other keys.  Constructor hooks are called once, at start, never inside a
step.  Observer hooks are called with what has happened, in batches, between steps.
Every context has ``options``, the plugin's own table in the configuration.  ``docs/plugins.md`` has an example of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from engine.checkpoints.fields import Fields
    from engine.checkpoints.shape import DecoderShape
    from engine.graphs.passes import GraphPass
    from engine.kv.events import KVEvent
    from engine.kv.eviction import EvictionStrategy
    from engine.layers.attention import AttentionFactory
    from engine.layers.comm import Comm
    from engine.layers.packing import LinearKernel
    from engine.plugins.encoder.encoder import Encoder
    from engine.plugins.kv_store.store import KVStore
    from engine.plugins.snapshots.policy import SnapshotPolicy
    from engine.plugins.transfer.transfer import PageCarrier
    from engine.scheduling.meter import RequestMetrics
    from engine.scheduling.policy import SchedulingPolicy
    from engine.scheduling.proposer import DraftModel, Proposer
    from engine.text.grammar import GrammarEngine
    from engine.text.processors import LogitsProcessor
    from engine.text.reasoning import ReasoningFormat
    from engine.text.tool_calls import ToolFormat

PROJECT = "callboard"
# The version of everything on this page and of the protocols it names; docs/plugins.md describes its guarantees.
API_VERSION = 1
OLDEST_API_VERSION = 1  # the oldest version that plugins may declare

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The arguments of an attention plugin.

    device: 'cpu' or 'cuda'.  dtype: 'float32', 'bfloat16', 'float16'.  window: sliding window in tokens, 0 for none.
    phases: the phases to serve, 'prefill', 'decode' or both.
    needs: further features of the model's attention, as in ``Declaration.supports``.
    kv_layout: of the pool, 'layer_first' or 'page_first'; '' if not known yet.
    kv_dtype: type of the pool's pages if it is not dtype: 'float32', 'bfloat16', 'float16', 'int8' or 'fp8_e4m3'; else
    ''.  invariant: a token's result must have the same bits in every step, as in ``Declaration.invariant``."""

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
    """The arguments of a model family.

    architecture: the first of ``architectures`` in config.json.  fields: all of config.json, read field by field."""

    architecture: str
    fields: "Fields"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommContext:
    """The arguments of a communication plugin.

    device: 'cpu' or 'cuda'; on a GPU the rank's own is the current one.
    rendezvous: URL where the ranks of this group alone meet: file:///path, tcp://host:port or env:///name; empty for
    one rank."""

    rank: int
    size: int
    device: str
    rendezvous: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinearContext:
    """The arguments of a linear plugin.

    device: 'cpu' or 'cuda'.  dtype: of inputs and outputs, 'float32', 'bfloat16' or 'float16'.
    quantization: type to keep weights in; 'none' rounds no more than products in dtype do.
    checkpoint_dtype: type of the saved weights; their values fit it exactly.
    scale_block: (outputs, inputs) that share a scale in a float8 checkpoint, 0 for all; None for another checkpoint.
    stored_formats: formats of matrices in blocks, by ggml's names, or 'int4' of AWQ, GPTQ and so on.
    instruction_sets: of this CPU, among 'avx2', 'avx512', 'amx' and 'neon'; None if unknown.
    traced: a compiler will trace products.  invariant: a row's result must have the same bits whatever other rows there
    are."""

    device: str
    dtype: str
    quantization: str = "none"
    checkpoint_dtype: str = ""
    instruction_sets: tuple[str, ...] | None = None
    traced: bool = False
    invariant: bool = False
    scale_block: tuple[int, int] | None = None
    stored_formats: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncoderContext:
    """The arguments of an encoder of pictures.  directory: the checkpoint's.  config: its config.json."""

    directory: "Path"
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """The arguments of an eviction plugin."""

    page_size: int
    num_pages: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotContext:
    """The arguments of a policy of snapshots."""

    page_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVStoreContext:
    """The arguments of a store of KV pages.

    record_bytes: the size of each record.  namespace: hex, equal for engines that may share records; the records'
    names differ between namespaces anyway.  rank, size: of the rank's group."""

    record_bytes: int
    namespace: str
    rank: int = 0
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The arguments of a carrier of KV pages.

    receive: called with a message and the bytes after it.  most_bytes: of both.  rank: of the executor.
    group_bytes: of the largest group of pages that is sent; a carrier that never has room for it refuses to start."""

    receive: Callable[[bytes, bytes], None]
    most_bytes: int
    rank: int = 0
    group_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The arguments of a scheduling policy.  max_running: most requests that run at once."""

    max_running: int
    page_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The arguments of a proposer.  vocab_size: of the model.  max_len: most tokens of a sequence."""

    vocab_size: int
    max_len: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """The arguments of a grammar plugin.

    pieces: every token's bytes, by id; the names of special ones.  vocab_size: of the model, which may be larger.
    eos_token_ids: the tokens that end an output."""

    vocab_size: int
    pieces: "Sequence[bytes]"
    special_token_ids: "Sequence[int]"
    eos_token_ids: "Sequence[int]"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParserContext:
    """The arguments of a tool parser or reasoning parser.  template: the model's chat template, '' without one."""

    template: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """The arguments of an observer.  page_size: tokens per page, and so per hash of a KV event."""

    page_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """The arguments of a logits processor.  vocab_size: the number of logits of a row."""

    vocab_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphPassContext:
    """Arguments of a graph pass.  device: 'cpu' or 'cuda'.  dtype: the model's, 'float32', 'bfloat16', 'float16'."""

    device: str
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)


# ---- constructors: exactly one plugin of each kind is chosen and called -----------------------


@hookspec(firstresult=True)
def callboard_attention_backend(context: AttentionContext) -> "AttentionFactory | None":
    """Return the factory of one rank's attention backend.

    Called: once per executor, before the KV pool is allocated.
    Returns: a callable (spec, pool) -> AttentionBackend, as in ``engine/layers/attention.py``.
    Raises: PluginError if it cannot run with this device, dtype, head size or page size.
    """


@hookspec(firstresult=True)
def callboard_model(context: ModelContext) -> "DecoderShape | None":
    """Return the structure of a checkpoint's model, read from its config.json.

    A plugin lists the architectures that it reads in ``CALLBOARD_PLUGIN["architectures"]``.
    Called: in every process that needs to know the model, before weights are read; no torch, no device.
    Returns: a DecoderShape, as in ``engine/checkpoints/shape.py``; its parts may be the plugin's own.
    Raises: WeightsError from ``fields.error``, which names the field that is not supported.
    """


@hookspec(firstresult=True)
def callboard_comm(context: CommContext) -> "Comm | None":
    """Build the communicator of one rank's tensor-parallel group.

    Called: once per executor, before weights are loaded.
    Returns: a Comm, as in ``engine/layers/comm.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_linear(context: LinearContext) -> "LinearKernel | None":
    """Build the kernel that lays out the weights of linear layers and multiplies by them.

    Called: once per executor for the layers and perhaps once for the LM head, before weights are loaded.
    Returns: a LinearKernel, as in ``engine/layers/packing.py``.
    Raises: PluginError if it cannot run with this device, dtype or quantization.
    """


@hookspec(firstresult=True)
def callboard_eviction_strategy(context: EvictionContext) -> "EvictionStrategy | None":
    """Build the strategy that orders cached pages for eviction when the pool is full.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: an EvictionStrategy, as in ``engine/kv/eviction.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_encoder(context: EncoderContext) -> "Encoder | None":
    """Build the encoder of a model's pictures.

    A plugin lists the architectures that it knows in ``CALLBOARD_PLUGIN["architectures"]``.
    Called: once per process that reads requests, and once per executor; no torch, no device.
    Returns: an Encoder, as in ``engine/plugins/encoder/encoder.py``.
    Raises: WeightsError that names the file and the field that is not supported.
    """


@hookspec(firstresult=True)
def callboard_snapshot_policy(context: SnapshotContext) -> "SnapshotPolicy | None":
    """Build the policy that chooses where the prefix cache keeps the states of recurrent layers.

    Called: once, when the scheduler is built, for a model with such layers; no torch, no device.
    Returns: a SnapshotPolicy, as in ``engine/plugins/snapshots/policy.py``.
    Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_kv_store(context: KVStoreContext) -> "KVStore | None":
    """Build the store that keeps KV pages outside the pool, possibly outside the process.

    Called: once per executor, when its KV pool exists.
    Returns: a KVStore, as in ``engine/plugins/kv_store/store.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_transfer(context: TransferContext) -> "PageCarrier | None":
    """Build what carries KV pages to other engines, and from them.

    Called: once per executor, when its KV pool exists.
    Returns: a PageCarrier, as in ``engine/plugins/transfer/transfer.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_scheduling_policy(context: PolicyContext) -> "SchedulingPolicy | None":
    """Build the policy that orders waiting requests.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: a SchedulingPolicy, as in ``engine/scheduling/policy.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_proposer(context: ProposerContext) -> "Proposer | DraftModel | None":
    """Build the proposer of draft tokens, so that one step can verify several tokens.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: a Proposer, or a DraftModel for the executors, as in ``engine/scheduling/proposer.py``.
    Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_grammar_engine(context: GrammarContext) -> "GrammarEngine | None":
    """Build the engine that compiles grammars and returns the allowed next tokens, for structured output.

    Called: once per process, in a worker thread, when the first request needs it; no torch, no device.
    Returns: a GrammarEngine, as in ``engine/text/grammar.py``.  Raises: PluginError if its options are wrong.
    """


# ---- graph passes: as many as the configuration names, in its order -------------------------------


@hookspec(firstresult=True)
def callboard_graph_pass(context: GraphPassContext) -> "GraphPass | None":
    """Build a pass that changes the model's traced pieces before they are compiled, with graphs.mode=compiled.

    Called: once per executor, before weights are loaded.
    Returns: a GraphPass, as in ``engine/graphs/passes.py``.  Raises: PluginError if its options are wrong.
    """


# ---- logits processors: as many as the configuration names, in its order ---------------------------


@hookspec(firstresult=True)
def callboard_logits_processor(context: LogitsProcessorContext) -> "LogitsProcessor | None":
    """Build a processor that changes the logits of requests that name it.

    Called: once per process that reads requests, which may lack torch, and once per executor.
    Returns: a LogitsProcessor, as in ``engine/text/processors.py``.  Raises: PluginError if its options are wrong.
    """


# ---- parsers: one of each kind is chosen, by name or by the chat template -------------------------


@hookspec(firstresult=True)
def callboard_tool_parser(context: ParserContext) -> "ToolFormat | None":
    """Return the format of the model's function calls.

    Called: once per process that reads outputs, when the tokenizer is loaded; no torch, no device.
    Returns: a ToolFormat, as in ``engine/text/tool_calls.py``.  Raises: PluginError if its options are wrong.
    """


@hookspec(firstresult=True)
def callboard_reasoning_parser(context: ParserContext) -> "ReasoningFormat | None":
    """Return the format of the model's thoughts before its answer.

    Called: once per process that reads outputs, when the tokenizer is loaded; no torch, no device.
    Returns: a ReasoningFormat, as in ``engine/text/reasoning.py``.  Raises: PluginError if its options are wrong.
    """


# ---- observers: as many as the configuration names, in its order ---------------------------------


@hookspec
def callboard_observer(context: ObserverContext) -> object | None:
    """Build an observer that has options or state: an object with the hooks below as its methods.

    A plugin without these omits this hook and implements the ones below as functions of its module.
    Called: once per engine, before its actors start, for every observer with its own options.
    Returns: any object whose methods are marked ``@hookimpl``.  Raises: PluginError if its options are wrong.
    """


@hookspec
def callboard_request_finished(requests: "Sequence[RequestMetrics]") -> None:
    """Handle requests that have ended, in this order: their cost and times.  Refused requests are not included.

    Called: between steps, with all that have ended since the last call; never with none.
    It runs on the scheduler's loop: return at once, and hand slow work to a queue or thread of your own.
    If it raises, the error is logged with the plugin's name, and neither this hook nor the next one of this observer is
    called again; requests and other observers are not affected.
    """


@hookspec
def callboard_kv_event(events: "Sequence[KVEvent]") -> None:
    """Handle pages that were stored, removed or restored, in this order; ``engine/kv/events.py`` defines the events.

    Called: between steps, with all events since the last call; never with none.  Events are recorded, and pages
    hashed, only if some plugin implements this hook.  Return at once; an exception has the same effect as above.
    """


@hookspec
def callboard_engine_stopped() -> None:
    """Flush and release resources: the engine has ended or crashed, and no hook is called after this.

    Called: once, even for an observer that has raised before.
    """
