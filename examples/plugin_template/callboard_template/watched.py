"""Another attention backend, watched: every so many calls, one sequence is compared with the definition of attention.

A wrong result ends the engine, with an error that names the layer and the sequence; that is better than to serve it.
What is compared is copied to the CPU, so on a GPU each comparison waits for the device.

Legend: T new tokens in the step (ragged, packed) · N query heads · H head size"""

import logging
from dataclasses import replace
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from callboard.plugins import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionFactory,
    AttentionSpec,
    KVPool,
    Options,
    PluginError,
    attention_factory,
    decode_options,
    hookimpl,
)
from callboard.plugins.testing import TOLERANCES, attend

# No limits of its own: what the other backend cannot do, that one says.
CALLBOARD_PLUGIN = {"api": 1}

log = logging.getLogger(__name__)


class WatchedOptions(Options, frozen=True):
    """The options.  backend: the one that does the work.  every: compare one call in so many."""

    backend: str = "torch"
    every: Annotated[int, Meta(ge=1)] = 256


class WatchedAttention:
    """An ``AttentionBackend``.  num_calls, num_compared: so far."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, pool: KVPool, every: int) -> None:
        self.num_calls = 0
        self.num_compared = 0
        self._backend = backend
        self._spec = spec
        self._pool = pool
        self._every = every
        self._batch: AttentionBatch | None = None

    def plan_step(self, batch: AttentionBatch) -> None:
        """Keep the batch for as long as the step runs."""
        self._batch = batch
        self._backend.plan_step(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return the result of the other backend."""
        out_TNH = self._backend.attend(layer, q_TNH)
        if self.num_calls % self._every == 0:
            self._compare(layer, q_TNH, out_TNH)
        self.num_calls += 1
        return out_TNH

    def _compare(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """One sequence, another one each time."""
        batch, page_size = self._batch, self._pool.page_size
        assert batch is not None, "attend before plan_step"
        row = self.num_compared % len(batch.host_lengths)
        self.num_compared += 1
        length, count = int(batch.host_lengths[row]), int(batch.host_query_lengths[row])
        if length == 0:  # padding
            return
        first = int(batch.host_query_lengths[:row].sum())
        place = torch.arange(length, device=q_TNH.device)
        slots = batch.page_table_BP[row, place // page_size].long() * page_size + place % page_size
        spec = self._spec
        expected_nNH = attend(
            q_TNH[first : first + count],
            self._pool.keys(layer)[slots],
            self._pool.values(layer)[slots],
            spec.scale,
            spec.window_of(layer),
            spec.soft_cap,
            spec.sinks[layer] if spec.sinks else None,
        )
        error_nNH = (out_TNH[first : first + count].double().cpu() - expected_nNH).abs()
        absolute, relative = TOLERANCES[str(q_TNH.dtype).removeprefix("torch.")]
        where = f"layer {layer}, sequence {row} (context {length}, {count} new)"
        # Not "any larger": NaN is neither larger nor smaller.
        if not (error_nNH <= 4 * (absolute + relative * expected_nNH.abs())).all():
            raise ValueError(f"{where}: off by {error_nNH.max():.3g}")
        log.info("call %d, %s: off by %.3g at most", self.num_calls, where, error_nNH.max())


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Options: see ``WatchedOptions``."""
    options = decode_options("attention.watched", context.options, WatchedOptions)
    if options.backend in ("auto", "watched"):
        raise PluginError(f"attention.watched: backend={options.backend!r}: name the backend to be watched")
    factory = attention_factory(options.backend, replace(context, options={}))

    def build(spec: AttentionSpec, pool: KVPool) -> WatchedAttention:
        return WatchedAttention(factory(spec, pool), spec, pool, options.every)

    return build
