"""The one page a plugin author reads: every hook callboard asks, when it asks, and what to return.

A plugin is a module with functions marked ``@hookimpl``, published under the entry-point group
``callboard`` with a name ``<kind>.<name>`` (for example ``attention.mykernel``).  It is imported only when the
configuration chooses it.  Constructor hooks are asked once, at start; they are never called inside a step.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from engine.kv.eviction import EvictionStrategy
    from engine.layers.attention import AttentionFactory
    from engine.layers.comm import Comm

PROJECT = "callboard"
SPEC_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What an attention plugin is told.  device: 'cpu' or 'cuda'.  dtype: 'float32', 'bfloat16', 'float16'.
    window: sliding window in tokens, 0 for none.  options: the plugin's own table from the configuration."""

    device: str
    dtype: str
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommContext:
    """What a communication plugin is told.  options: the plugin's own table from the configuration."""

    rank: int
    size: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What an eviction plugin is told.  options: the plugin's own table from the configuration."""

    page_size: int
    num_pages: int
    options: dict[str, Any] = field(default_factory=dict)


@hookspec(firstresult=True)
def callboard_attention_backend(context: AttentionContext) -> "AttentionFactory | None":
    """Say how to build the attention backend of one rank.

    Called: once per executor, before the KV pool is allocated.
    Returns: a callable (spec, pool) -> AttentionBackend, see ``engine/layers/attention.py``.
    Raises: PluginError if it cannot run with this device, dtype, head size or page size.
    """


@hookspec(firstresult=True)
def callboard_comm(context: CommContext) -> "Comm | None":
    """Build the communicator of one rank's tensor-parallel group.

    Called: once per executor, before weights are loaded.
    Returns: a Comm, see ``engine/layers/comm.py``.  Raises: PluginError if it cannot run here.
    """


@hookspec(firstresult=True)
def callboard_eviction_strategy(context: EvictionContext) -> "EvictionStrategy | None":
    """Build the strategy that decides which cached pages go first when the pool is full.

    Called: once, when the scheduler is built; no torch, no device.
    Returns: an EvictionStrategy, see ``engine/kv/eviction.py``.  Raises: PluginError if its options are wrong.
    """
