"""Stands in for FlashInfer without a GPU: the same signatures, and attention computed from exactly what it is given.

Legend: B sequences · T tokens · N query heads · G KV heads · H head size · L keys
Its plans are not FlashInfer's, but they reach the kernel the same way: written to page-locked memory, copied to the
device when the stream gets there, and read by the kernel, which checks that this plan is for the lists it was given.
Every call is bound to the signature that was recorded from the package; see ``signatures.py``.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.attention.fake_device import FakeStream
from tests.attention.signatures import Call, Name, call_of, recorded

PLAN_BYTES = 8 << 20
MAX_GRID = 12  # blocks that the fake GPU runs at once: with so many rows x heads no sequence is split


def attend(q_NH: Tensor, keys_LGH: Tensor, values_LGH: Tensor, scale: float, sinks_N: Tensor | None = None) -> Tensor:
    group = len(q_NH) // keys_LGH.shape[1]
    keys_LNH, values_LNH = (x.double().repeat_interleave(group, 1) for x in (keys_LGH, values_LGH))
    scores_NL = torch.einsum("nh,lnh->nl", q_NH.double(), keys_LNH).mul(scale)
    if sinks_N is not None:
        scores_NL = torch.cat((scores_NL, sinks_N.double()[:, None]), -1)
    weights_NL = scores_NL.softmax(-1)[:, : len(keys_LNH)]
    return torch.einsum("nl,lnh->nh", weights_NL, values_LNH).to(q_NH.dtype)


class Wrapper:
    """What both kinds of wrapper do alike."""

    stream: FakeStream
    calls: list[tuple[str, dict[str, Any]]]

    def __init__(self, workspace: Tensor, backend: str) -> None:
        assert backend in ("fa2", "fa3"), f"{backend} would be decided anew at every plan"
        self.backend = backend
        self._workspace = workspace
        self._int_workspace_buffer = torch.zeros(PLAN_BYTES, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(PLAN_BYTES, dtype=torch.uint8)
        self._plan_info: list[int] | None = None
        self._cached_module: SimpleNamespace | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._workspace = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.zeros_like(int_workspace_buffer)

    def _check_host(self, starts_B1: Tensor, last_B: Tensor, indices_I: Tensor, page_size: int) -> None:
        for tensor in (starts_B1, last_B, indices_I):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        assert starts_B1[0] == 0
        assert len(starts_B1) == len(last_B) + 1
        assert (starts_B1.diff() > 0).all()
        assert ((last_B >= 1) & (last_B <= page_size)).all()
        assert len(indices_I) >= starts_B1[-1]

    def _write_plan(self, numbers: list[int]) -> None:
        """As the real planners do: fill the staging buffer, queue its copy."""
        numbers = [len(numbers), *numbers]
        staging, target = self._pin_memory_int_workspace_buffer, self._int_workspace_buffer
        assert staging.data_ptr() != target.data_ptr()
        size = 4 * len(numbers)
        staging[:size].view(torch.int32).copy_(torch.tensor(numbers, dtype=torch.int32))
        self.stream.queue(lambda: target[:size].copy_(staging[:size]))

    def _read_plan(self) -> list[int]:
        numbers = self._int_workspace_buffer.view(torch.int32)
        return numbers[1 : 1 + int(numbers[0])].tolist()

    def _queue_kernel(
        self,
        q_TNH: Tensor,
        pages: tuple[Tensor, Tensor],
        out_TNH: Tensor,
        lists: tuple[Tensor, Tensor, Tensor],
        query_starts_B1: Tensor,
        check_plan: Callable[[list[int], list[int]], None],
    ) -> None:
        assert q_TNH.stride(-1) == 1
        assert out_TNH.is_contiguous()
        assert out_TNH.shape == q_TNH.shape
        assert out_TNH.dtype == q_TNH.dtype == self._q_data_type
        assert pages[0].dtype == self._kv_data_type
        assert self._kv_data_type == self._q_data_type or self.backend != "fa3", "there is no such kernel"
        assert pages[0].stride() == pages[1].stride()
        scale, window_left = self._sm_scale, self._window_left
        starts_B1, indices_I, last_B = lists

        def kernel() -> None:
            counts = starts_B1.diff().tolist()
            check_plan(self._read_plan(), counts)
            page_size = pages[0].shape[1]
            for row, count in enumerate(counts):
                own = indices_I[starts_B1[row] : starts_B1[row] + count].long()
                length = (count - 1) * page_size + int(last_B[row])
                keys_LGH, values_LGH = (_pages(x, own).flatten(0, 1)[:length] for x in pages)
                first, last = query_starts_B1[row : row + 2].tolist()
                for place in range(first, last):
                    end = length - (last - place) + 1
                    begin = max(0, end - 1 - window_left) if window_left >= 0 else 0
                    out_TNH[place] = attend(q_TNH[place], keys_LGH[begin:end], values_LGH[begin:end], scale)

        self.stream.queue(kernel)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, backend)
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        self.graph = use_cuda_graph
        if use_cuda_graph:
            self._lists = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        self.calls.append(("decode.plan", locals()))
        self._check_host(indptr, last_page_len, indices, page_size)
        assert len(indices) == indptr[-1]
        if seq_lens is not None:
            assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last_page_len)
        if self.graph:
            for target, source in zip(self._lists, (indptr, indices, last_page_len), strict=True):
                assert target is not None
                part = target[: len(source)]
                self.stream.queue(lambda part=part, source=source: part.copy_(source))
            assert len(last_page_len) == len(self._lists[2])
        else:
            self._lists = (self.stream.upload(indptr), indices, self.stream.upload(last_page_len))
        self._cached_module = SimpleNamespace(run=self._launch, paged_run=self._launch)
        self._remember(num_qo_heads, num_kv_heads, sm_scale, window_left, q_data_type, kv_data_type)
        self._plan_from(indptr)

    def _remember(
        self, num_qo_heads: int, num_kv_heads: int, sm_scale: float | None, window_left: int, q_type: Any, kv_type: Any
    ) -> None:
        self._heads = (num_qo_heads, num_kv_heads)
        self._sm_scale, self._window_left = sm_scale, window_left
        self._q_data_type, self._kv_data_type = q_type, kv_type

    def _plan_from(self, indptr: Tensor) -> None:
        num_rows = len(indptr) - 1
        splits = self.use_tensor_cores or num_rows * self._heads[1] < MAX_GRID
        self._plan_info = [num_rows, 0, 0, 0, 0, 0, 0, 0, int(self.graph), int(splits)]
        if self.use_tensor_cores:
            self._plan_info += [0] * 5
        self._write_plan([num_rows, int(splits), *(indptr.diff().tolist() if splits else [])])

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor:
        self.calls.append(("decode.run", locals()))
        assert out is not None
        assert self._cached_module is not None
        launch = self._cached_module.paged_run if self.use_tensor_cores else self._cached_module.run
        keys, values = paged_kv_cache
        launch(self._workspace, self._plan_info, q, keys, values, *self._lists, out, lse)
        return out

    def _launch(
        self,
        workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        pages: Tensor,
        last: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """What the compiled module is called with, for each layer."""
        self.calls.append(("decode.launch", locals()))
        num_rows = len(starts) - 1
        assert plan_info is self._plan_info, "these arguments are of an older plan"
        assert q.shape[:2] == (num_rows, self._heads[0])

        def check(plan: list[int], counts: list[int]) -> None:
            assert plan[0] == num_rows, "this plan is for another batch"
            assert not plan[1] or plan[2:] == counts, "this plan is for other lengths"

        starts_B1 = torch.arange(num_rows + 1)
        self._queue_kernel(q, (keys, values), out, (starts, pages, last), starts_B1, check)


def _pages(pages: Tensor, own: Tensor) -> Tensor:
    """torch takes no elements of a tensor of 8-bit floats."""
    if pages.dtype.itemsize > 1:
        return pages[own]
    return pages.view(torch.uint8)[own].view(pages.dtype).float()


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    self.calls.append(("decode.fast_decode_plan", locals()))
    assert self._cached_module is not None, "plan() comes first"
    assert self.graph
    assert global_override_indptr_cpu is not None, "would ask the device"
    self._check_host(global_override_indptr_cpu, last_page_len, indices, page_size)
    assert indptr.data_ptr() == self._lists[0].data_ptr()
    self._remember(num_qo_heads, num_kv_heads, sm_scale, window_left, q_data_type, kv_data_type)
    self._plan_from(global_override_indptr_cpu)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, backend)
        assert kv_layout == "NHD"
        assert not use_cuda_graph

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        self.calls.append((f"prefill.plan {self.backend}", locals()))
        self._check_host(paged_kv_indptr, paged_kv_last_page_len, paged_kv_indices, page_size)
        assert causal
        assert seq_lens is not None
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(seq_lens, lengths)
        assert qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._lists = (
            self.stream.upload(paged_kv_indptr),
            paged_kv_indices,
            self.stream.upload(paged_kv_last_page_len),
        )
        self._query_starts = self.stream.upload(qo_indptr)
        self._num_rows = int(qo_indptr[-1])
        self._cached_module = SimpleNamespace(paged_run=self._launch)
        self._plan_info = [self._num_rows]
        self._num_heads = num_qo_heads
        self._sm_scale, self._window_left = sm_scale, window_left
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
        # FA3's plan has the lengths in it, FA2's only how many pages there are.
        self._write_plan([*paged_kv_indptr.diff().tolist(), *qo_indptr.diff().tolist()])

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        self.calls.append((f"prefill.run {self.backend}", locals()))
        assert out is not None, "without it the library writes zeros first"
        assert self._cached_module is not None
        keys, values = paged_kv_cache
        self._cached_module.paged_run(self._plan_info, q, keys, values, self._query_starts, *self._lists, out, lse)
        return out

    def _launch(
        self,
        plan_info: list[int],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        query_starts: Tensor,
        starts: Tensor,
        pages: Tensor,
        last: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """What the compiled module is called with, for each layer."""
        self.calls.append((f"prefill.launch {self.backend}", locals()))
        assert plan_info is self._plan_info, "these arguments are of an older plan"
        assert q.shape[:2] == (self._num_rows, self._num_heads)

        def check(plan: list[int], counts: list[int]) -> None:
            assert plan == [*counts, *query_starts.diff().tolist()], "this plan is for another batch"

        self._queue_kernel(q, (keys, values), out, (starts, pages, last), query_starts, check)


def append_paged_kv_cache(
    stream: FakeStream,
    calls: list[tuple[str, dict[str, Any]]],
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    calls.append(("append", {"positions": positions}))
    assert kv_layout == "NHD"
    for tensor in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert len(append_key) == len(append_value) == len(batch_indices) == len(positions)
    assert append_key.stride(-1) == append_value.stride(-1) == 1
    assert append_key.dtype == append_value.dtype == paged_kv_cache[0].dtype

    def kernel() -> None:
        page_size = paged_kv_cache[0].shape[1]
        for token, (sequence, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
            place = int(kv_indptr[sequence]) + position // page_size
            assert place < kv_indptr[sequence + 1]
            for target, source in zip(paged_kv_cache, (append_key, append_value), strict=True):
                target[kv_indices[place], position % page_size] = source[token]

    stream.queue(kernel)


def xqa_batch_decode_with_kv_cache(
    stream: FakeStream,
    calls: list[tuple[str, dict[str, Any]]],
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    kv_layout: str = "NHD",
) -> Tensor:
    """The kernel takes contiguous rows for granted, of queries and of pages, and reads lengths when it runs."""
    calls.append(("xqa", locals()))
    keys, values = kv_cache
    page_size, head_size = keys.shape[1], query.shape[2]
    assert out is not None
    assert (kv_layout, bmm2_scale) == ("NHD", 1.0)
    assert page_size in (16, 32, 64, 128)
    assert head_size % 16 == 0
    assert max_seq_len == block_tables.shape[1] * page_size
    for tensor in (query, block_tables, seq_lens, out):
        assert tensor.is_contiguous()
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert len(query) == len(block_tables) == len(seq_lens)
    assert keys.stride() == values.stride()
    assert not workspace_buffer[: 8 << 20].any(), "semaphores"

    def kernel() -> None:
        for row, length in enumerate(seq_lens.tolist()):
            own = block_tables[row, : -(-length // page_size)].long()
            begin = max(0, length - 1 - window_left) if window_left >= 0 else 0
            seen_keys, seen_values = (x[own].flatten(0, 1)[begin:length] for x in (keys, values))
            out[row] = attend(query[row], seen_keys, seen_values, bmm1_scale)

    stream.queue(kernel)
    return out


def binding(function: Callable[..., Any], made: set[Call], *names: Name) -> Callable[..., Any]:
    """The stand-in of a function, after its arguments have been bound to the recorded signatures of the real one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            made.add(call_of(name, args, kwargs))
            recorded(name).bind(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def fake_flashinfer(stream: FakeStream) -> Any:
    """The package.  calls: what has been called, with which arguments, in order.  made: what binding depends on."""
    calls: list[tuple[str, dict[str, Any]]] = []
    made: set[Call] = set()

    def wrapper(kind: type[Wrapper], module: str, **methods: tuple[str, ...]) -> type[Wrapper]:
        members: dict[str, Any] = {"stream": stream, "calls": calls}
        for method, real in methods.items():
            names = [(module, f"{kind.__name__}.{one}") for one in real]
            members[method] = binding(getattr(kind, method), made, *names)
        return type(kind.__name__, (kind,), members)

    return SimpleNamespace(
        __version__="0.7.fake",
        calls=calls,
        made=made,
        BatchDecodeWithPagedKVCacheWrapper=wrapper(
            BatchDecodeWithPagedKVCacheWrapper,
            "flashinfer.decode",
            __init__=("__init__",),
            plan=("plan", "_plan_impl"),  # the first hands everything on to the second
            run=("run",),
            reset_workspace_buffer=("reset_workspace_buffer",),
        ),
        BatchPrefillWithPagedKVCacheWrapper=wrapper(
            BatchPrefillWithPagedKVCacheWrapper,
            "flashinfer.prefill",
            __init__=("__init__",),
            plan=("plan",),
            run=("run",),
        ),
        decode=SimpleNamespace(
            fast_decode_plan=binding(fast_decode_plan, made, ("flashinfer.decode", "fast_decode_plan")),
            xqa_batch_decode_with_kv_cache=binding(
                functools.partial(xqa_batch_decode_with_kv_cache, stream, calls),
                made,
                ("flashinfer.decode", "xqa_batch_decode_with_kv_cache"),
            ),
        ),
        append_paged_kv_cache=binding(
            functools.partial(append_paged_kv_cache, stream, calls), made, ("flashinfer.page", "append_paged_kv_cache")
        ),
    )
