"""Stands in for FlashAttention without a GPU: its signatures, and attention computed from exactly what it is given.

Legend: B sequences · T tokens · P page-table width · N query heads · G KV heads · H head size · L keys
"""

from typing import Any

import torch
from torch import Tensor

from tests.attention.fake_flashinfer import attend
from tests.attention.signatures import Call, Name, call_of, names, recorded

LIBRARIES = {2: ("flash_attn",), 3: ("flash_attn_interface", "sgl_kernel")}


def offered(generation: int, function: str) -> list[Name]:
    """Where a function is, in every library of that generation."""
    return [name for library in LIBRARIES[generation] for name in names(library) if name[1] == function]


class FakeFlashAttention:
    """Both generations.  calls: (function, its arguments by name).  made: what of them binding depends on.

    fewest_queries: which the longest sequence of a call is said to have."""

    def __init__(self, fewest_queries: int = 1) -> None:
        self.fewest_queries = fewest_queries
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.made: set[Call] = set()
        self.scheduled_dtypes: set[torch.dtype] = set()

    def _bind(self, generation: int, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name.  Raises TypeError if a library of that generation would not take them.

        Only SGLang's build is ever given sinks."""
        offers = offered(generation, function)
        if "sinks" in kwargs:
            offers = [name for name in offers if name[0] == "sgl_kernel.flash_attn"]
        self.made |= {call_of(name, args, kwargs) for name in offers}
        first, *_ = [recorded(name).bind(*args, **kwargs).arguments for name in offers]
        return dict(first)

    def fa2_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind(2, "flash_attn_with_kvcache", args, kwargs)
        self.calls.append(("fa2 decode", call))
        assert call["q"].shape[1] == 1
        out = self._attend(call, call["q"][:, 0], call["k_cache"], call["v_cache"], call["block_table"], 256)
        return out[:, None]

    def fa2_varlen(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind(2, "flash_attn_varlen_func", args, kwargs)
        self.calls.append(("fa2 prefill", call))
        key_starts, query_starts = call["cu_seqlens_k"], call["cu_seqlens_q"]
        assert key_starts.dtype == torch.int32
        assert call["max_seqlen_k"] == key_starts.diff().max()
        call = {**call, "cache_seqlens": key_starts.diff(), "cu_seqlens_q": query_starts}
        return self._attend(call, call["q"], call["k"], call["v"], call["block_table"], 256)

    def fa3_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind(3, "flash_attn_with_kvcache", args, kwargs)
        self.calls.append(("fa3", call))
        metadata = call["scheduler_metadata"]
        if call["q"].dtype == torch.float8_e4m3fn:
            assert call["q"].shape[-1] % 16 == 0
        if "qv" in call:
            assert call["q"].dtype == call["qv"].dtype
            assert call["q"].dtype != torch.float8_e4m3fn
            assert call["q"].shape[-1] <= 64
            assert call["k_cache"].shape[-2:] == (1, call["q"].shape[-1])
            assert call["qv"].shape[-1] == call["v_cache"].shape[-1]
        if metadata is not None:
            width = call["page_table"].shape[1] * call["k_cache"].shape[1]
            assert metadata.tolist() == _metadata(
                call["max_seqlen_q"],
                width,
                call["num_splits"],
                call["window_size"],
                call["cache_seqlens"],
                call["cu_seqlens_q"],
            )
        return self._attend(call, call["q"], call["k_cache"], call["v_cache"], call["page_table"], 1)

    def scheduler_metadata(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind(3, "get_scheduler_metadata", args, kwargs)
        self.calls.append(("metadata", call))
        assert call["causal"] is True
        assert call["headdim"] <= 256 >= call["headdim_v"] or (call["headdim"] <= 64 and call["headdim_v"] <= 512)
        self.scheduled_dtypes.add(call["qkv_dtype"])
        assert call["batch_size"] == len(call["cache_seqlens"])
        numbers = _metadata(
            call["max_seqlen_q"],
            call["max_seqlen_k"],
            call["num_splits"],
            call["window_size"],
            call["cache_seqlens"],
            call["cu_seqlens_q"],
        )
        return torch.tensor(numbers, dtype=torch.int32)

    def _attend(
        self, call: dict[str, Any], q_TNH: Tensor, keys: Tensor, values: Tensor, table_BP: Tensor, page_rule: int
    ) -> Tensor:
        """What the documentation of the functions says, in float64."""
        lengths_B, page_size = call["cache_seqlens"], keys.shape[1]
        starts_B1 = call.get("cu_seqlens_q", torch.arange(len(q_TNH) + 1, dtype=torch.int32))
        assert call["causal"] is True
        assert page_size % page_rule == 0
        assert table_BP.stride(-1) == q_TNH.stride(-1) == keys.stride(-1) == 1
        for tensor in (lengths_B, starts_B1, table_BP):
            assert tensor.dtype == torch.int32
            assert tensor is table_BP or tensor.is_contiguous()
        assert starts_B1[0] == 0
        assert starts_B1[-1] == len(q_TNH)
        assert len(table_BP) == len(lengths_B) == len(starts_B1) - 1
        assert call.get("max_seqlen_q", 1) == max(starts_B1.diff().max(), self.fewest_queries)
        assert lengths_B.max() <= table_BP.shape[1] * page_size
        left, right = call["window_size"]
        assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
        assert q_TNH.dtype == keys.dtype == values.dtype, "queries, keys and values of one type"
        is_float8 = q_TNH.dtype == torch.float8_e4m3fn
        if "qv" in call:
            assert call["qv"].stride(-1) == 1
            q_TNH, keys = torch.cat((q_TNH, call["qv"]), -1), torch.cat((keys, values), -1)
        out_shape = (*q_TNH.shape[:2], values.shape[-1])
        out_TNH = torch.empty(out_shape, dtype=torch.bfloat16 if is_float8 else q_TNH.dtype)
        q_TNH, keys, values = (x.float() if is_float8 else x for x in (q_TNH, keys, values))
        for row, length in enumerate(lengths_B.tolist()):
            own = table_BP[row, : -(-length // page_size)].long()
            keys_LGH, values_LGH = (x[own].flatten(0, 1)[:length] for x in (keys, values))
            first, last = starts_B1[row : row + 2].tolist()
            for place in range(first, last):
                position = length - (last - place)
                begin = max(0, position - left) if left >= 0 else 0
                visible = slice(begin, position + 1)
                seen = keys_LGH[visible], values_LGH[visible]
                out_TNH[place] = attend(q_TNH[place], *seen, call["softmax_scale"], call.get("sinks"))
        return out_TNH


def _metadata(
    max_queries: int, max_keys: int, num_splits: int, window: tuple[int, int], lengths_B: Tensor, starts_B1: Tensor
) -> list[int]:
    """Everything that a schedule depends on."""
    return [max_queries, max_keys, num_splits, *window, *lengths_B.tolist(), *starts_B1.tolist()]
