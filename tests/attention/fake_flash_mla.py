"""Stands in for FlashMLA without a GPU: its signatures, and attention computed from exactly what it is given.

Legend: B sequences · N query heads · H head size · L keys
A division of the keys is empty at first; the call that fills it is for the lengths of that moment, as FlashMLA's is.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.attention.fake_flashinfer import attend
from tests.attention.signatures import Call, call_of, names, recorded

MODULES = ("flash_mla.flash_mla_interface", "sgl_kernel.flash_mla")
PAGE = 64


class FakeFlashMLA:
    """Both libraries.  made: what of their calls binding depends on.  divided: how often keys were divided."""

    __name__ = "flash_mla"

    def __init__(self) -> None:
        self.made: set[Call] = set()
        self.divided = 0
        self.calls: list[dict[str, Any]] = []

    def _bind(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        offers = [(module, function) for module in MODULES]
        assert {*offers} <= {*names("flash_mla"), *names("sgl_kernel")}
        self.made |= {call_of(name, args, kwargs) for name in offers}
        *_, last = [recorded(name).bind(*args, **kwargs).arguments for name in offers]
        return dict(last)

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[SimpleNamespace, None]:
        assert not self._bind("get_mla_metadata", args, kwargs), "with lengths it would be for one library alone"
        return SimpleNamespace(lengths=None), None

    def flash_mla_with_kvcache(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call = self._bind("flash_mla_with_kvcache", args, kwargs)
        self.calls.append(call)
        q_B1NH, pages, table_BP, lengths_B = (call[one] for one in ("q", "k_cache", "block_table", "cache_seqlens"))
        division = call["tile_scheduler_metadata"]
        if division.lengths is None:
            division.lengths, self.divided = lengths_B.clone(), self.divided + 1
        assert torch.equal(division.lengths, lengths_B), "the keys were divided for other lengths"
        assert pages.shape[1:3] == (PAGE, 1)
        assert pages.dtype == q_B1NH.dtype
        assert q_B1NH.shape[1] == 1
        assert pages.shape[-1] == q_B1NH.shape[-1] == 576
        assert call["head_dim_v"] == 512
        assert pages.stride(-1) == q_B1NH.stride(-1) == table_BP.stride(-1) == 1
        assert table_BP.dtype == lengths_B.dtype == torch.int32
        assert lengths_B.is_contiguous()
        assert len(lengths_B) == len(table_BP) == len(q_B1NH)
        assert int(lengths_B.min()) > 0
        out_B1NH = q_B1NH.new_empty(*q_B1NH.shape[:3], 512)
        for row, length in enumerate(lengths_B.tolist()):
            own = table_BP[row, : -(-length // PAGE)].long()
            latents_L1H = pages[own].flatten(0, 1)[:length]
            out_B1NH[row, 0] = attend(q_B1NH[row, 0], latents_L1H, latents_L1H[..., :512], call["softmax_scale"])
        return out_B1NH, torch.empty(0)
