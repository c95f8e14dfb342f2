"""Every call into FlashInfer: planning and running decode rows and prefill segments, and storing keys and values.

Legend: T tokens · B sequences · N query heads · G KV heads · H head size
Owns: the arguments, the buffer of each plan.  Does not know: batches, layers, the place of rows in a step.

A plan assigns parts of sequences to blocks of the GPU.  FlashInfer computes it on the host, writes it to page-locked
memory and queues a copy to the device.  It has one such buffer per wrapper and does not report when the buffer may be
rewritten, so every plan is given a buffer from a ring instead.  On the device one buffer is enough: the copy is queued
after the kernels that read the previous plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flashinfer.arguments import PlannedKernel
from engine.plugins.attention.flashinfer.lists import DeviceLists, HostLists, Int32
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.support.paging import KVPages, pages_of
from engine.types.errors import PluginError

PLAN_BYTES = 8 << 20  # bytes that a wrapper allocates for a plan
GRAPH_PLAN_BYTES = 1 << 20  # decode rows alone need at most 40 bytes each, and there is a wrapper per captured size
STAGING = "_pin_memory_int_workspace_buffer"  # a private attribute, checked at start
DECODE_PLAN_LENGTH = 10  # length of a plan without tensor cores; its last entry is whether rows are split
FA3_TILE = 128  # queries per block of FA3


@dataclass(frozen=True, slots=True)
class Setup:
    """The values that all wrappers share.

    workspace: memory for partial results, uint8, zero at first.  One is enough: kernels of a stream do not overlap.
    window: as in ``AttentionSpec``, 0 for none.  tensor_cores: whether the decode kernel uses them.
    """

    library: ModuleType
    spec: AttentionSpec
    pool: KVPool
    workspace: Tensor
    plans: StagingRing
    tensor_cores: bool
    num_sms: int

    def problem(self, window: int) -> dict[str, Any]:
        """Return the arguments of every decode plan that do not change between steps."""
        return {
            "num_qo_heads": self.spec.num_heads,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_size,
            "page_size": self.pool.page_size,
            # The query's own position is not counted, and -1 is no limit.
            "window_left": window - 1,
            "sm_scale": self.spec.scale,
            "q_data_type": self.pool.dtype,
            "kv_data_type": self.pool.format.stored,
            "non_blocking": True,
        }

    @contextmanager
    def staging(self, wrapper: Any) -> Iterator[None]:
        """Give the wrapper a buffer that no queued copy reads, for a plan made inside the block."""
        staging = self.plans.take(PLAN_BYTES)
        setattr(wrapper, STAGING, staging.data[:PLAN_BYTES])
        try:
            yield
        finally:
            staging.sent()


class WrapperPlanner:
    """Computes a part of each step by one of FlashInfer's wrappers."""

    _kernel: PlannedKernel

    def plan(self, host: HostLists, pages_I: Tensor, query_lengths: Int32) -> None:
        """Prepare the kernel for these sequences."""
        raise NotImplementedError

    def run(self, q_TNH: Tensor, pages: KVPages, out_TNH: Tensor) -> None:
        """Compute the planned sequences in one layer."""
        self._kernel(q_TNH, pages, out_TNH)


class DecodeRows(WrapperPlanner):
    """Any number of sequences with one query each."""

    def __init__(self, setup: Setup, window: int, **graph_buffers: Any) -> None:
        self._setup = setup
        self._problem = setup.problem(window)
        wrapper = setup.library.BatchDecodeWithPagedKVCacheWrapper(
            setup.workspace, kv_layout="NHD", use_tensor_cores=setup.tensor_cores, backend="fa2", **graph_buffers
        )
        self._wrapper = with_staging(wrapper, setup.library)

    def plan(self, host: HostLists, pages_I: Tensor, query_lengths: Int32) -> None:
        with self._setup.staging(self._wrapper):
            self._wrapper.plan(
                indptr=host.starts_B1,
                indices=pages_I,
                last_page_len=host.last_B,
                seq_lens=host.lengths_B,
                **self._problem,
            )
        self._kernel = PlannedKernel(self._wrapper)


class PrefillSegments(WrapperPlanner):
    """Sequences with any number of queries each.

    backend: 'fa3' uses Hopper's tensor cores best, but a block works on all keys of its queries: with few queries most
    of the GPU is idle.  'fa2' splits the keys as well then, and is the only one to read pages of another type than the
    queries'.  'auto' decides for each step.
    """

    def __init__(self, setup: Setup, window: int, backend: str) -> None:
        self._setup = setup
        if backend == "auto" and not setup.pool.format.plain:
            backend = "fa2"
        problem = setup.problem(window)
        self._problem = {"head_dim_qk": problem.pop("head_dim"), "causal": True, **problem}
        new_wrapper = setup.library.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = {
            name: with_staging(new_wrapper(setup.workspace, kv_layout="NHD", backend=name), setup.library)
            for name in (("fa2", "fa3") if backend == "auto" else (backend,))
        }
        self._backend = backend

    def plan(self, host: HostLists, pages_I: Tensor, query_lengths: Int32) -> None:
        wrapper = self._wrappers[self.choose(query_lengths)]
        with self._setup.staging(wrapper):
            wrapper.plan(
                qo_indptr=host.query_starts_B1,
                paged_kv_indptr=host.starts_B1,
                paged_kv_indices=pages_I,
                paged_kv_last_page_len=host.last_B,
                seq_lens=host.lengths_B,
                **self._problem,
            )
        self._kernel = PlannedKernel(wrapper)

    def choose(self, query_lengths: Int32) -> str:
        """Return the backend for these queries: 'fa3' if its blocks can fill the GPU."""
        if self._backend != "auto":
            return self._backend
        num_tiles = int((-(-query_lengths // FA3_TILE)).sum()) * self._setup.spec.num_heads
        return "fa3" if num_tiles >= self._setup.num_sms else "fa2"


class GraphRows(DecodeRows):
    """A fixed number of decode rows with captured kernels, which read the buffers of the capture.

    A plan depends on the number of pages of each row, not on which pages, nor on tokens.  Without tensor cores, once
    the rows fill the GPU and none is split, it does not depend on that either: then ``splits`` is False, and one plan
    is enough.
    """

    def __init__(self, setup: Setup, window: int, lists: DeviceLists) -> None:
        """Make the wrapper.  lists: the caller fills them before these rows run."""
        super().__init__(
            setup,
            window,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=lists.starts_B1,
            paged_kv_indices_buffer=lists.pages_I1[:-1],
            paged_kv_last_page_len_buffer=lists.last_B,
        )
        small = torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=setup.workspace.device)
        self._wrapper.reset_workspace_buffer(setup.workspace, small)
        self._starts_B1 = lists.starts_B1
        self._is_planned = False
        self.splits = True

    def plan(self, host: HostLists, pages_I: Tensor, query_lengths: Int32) -> None:
        is_planned, self._is_planned = self._is_planned, False  # a plan that fails may be incomplete
        if is_planned:
            with self._setup.staging(self._wrapper):
                self._setup.library.decode.fast_decode_plan(
                    self._wrapper,
                    indptr=self._starts_B1,
                    indices=pages_I,
                    last_page_len=host.last_B,
                    global_override_indptr_cpu=host.starts_B1,
                    **self._problem,
                )
            self._kernel = PlannedKernel(self._wrapper)
        else:
            super().plan(host, pages_I, query_lengths)
            self.splits = self._setup.tensor_cores or splits_rows(self._wrapper)
        self._is_planned = True


def splits_rows(wrapper: Any) -> bool:
    """Whether the plan of a decode kernel without tensor cores splits sequences; True if unknown."""
    plan = getattr(wrapper, "_plan_info", None)
    return plan is None or len(plan) != DECODE_PLAN_LENGTH or bool(plan[DECODE_PLAN_LENGTH - 1])


def with_staging(wrapper: Any, library: ModuleType) -> Any:
    """Return the wrapper if it has its staging buffer in the expected attribute.  Raises PluginError."""
    if not isinstance(getattr(wrapper, STAGING, None), Tensor):
        raise PluginError(
            f"attention.flashinfer: FlashInfer {getattr(library, '__version__', '(unknown version)')} keeps plans in "
            "other buffers than 0.7 does, which would be overwritten while a step runs; install flashinfer-python "
            "0.7, or set plugins.attention=torch"
        )
    return wrapper


class PagedAppend:
    """Writes a step's keys and values, for ``KVPool.store_by``.  Its own tensors never change, so it may be captured.

    FlashInfer finds a token's place by its sequence's page list.  With a single sequence that has all pages of the pool
    in order, positions are slots: these are known already, and no list has to be made.
    """

    def __init__(self, library: ModuleType, pool: KVPool) -> None:
        num_pages, page_size, device = pool.num_pages + 1, pool.page_size, pool.data.device
        self._append = library.append_paged_kv_cache
        self._layers = pages_of(pool)
        self._pages_P = torch.arange(num_pages, dtype=torch.int32, device=device)
        self._starts_2 = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
        self._last_1 = torch.tensor([page_size], dtype=torch.int32, device=device)

    def __call__(self, layer: int, k_TGH: Tensor, v_TGH: Tensor, slots_T: Tensor) -> None:
        """Store one layer.  k_TGH and v_TGH may be parts of wider tensors.  slots_T: int64, below 2**31."""
        positions_T = slots_T.int()
        self._append(
            append_key=k_TGH,
            append_value=v_TGH,
            batch_indices=torch.zeros_like(positions_T),
            positions=positions_T,
            paged_kv_cache=self._layers[layer],
            kv_indices=self._pages_P,
            kv_indptr=self._starts_2,
            kv_last_page_len=self._last_1,
            kv_layout="NHD",
        )
