"""Attention of pictures that see all of themselves: each of a picture's tokens attends to those behind it, too.

In some models only layers with a window do so.

Legend: T new tokens in the step (ragged, packed) · n of them in one picture · L keys up to the picture's end
        N query heads · G KV heads · H head size
Owns: the attention of these tokens, next to a backend that computes all others.  Does not know: where pictures are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class WholePicture:
    """A picture's tokens in a step: ``first:last`` of T, of which the first has the position ``start`` of its row.

    slots_L: of the row's keys up to the picture's end, on the device."""

    first: int
    last: int
    start: int
    slots_L: Tensor


class WholeAttention:
    """A backend with other results for pictures.  Other attributes are those of the backend."""

    def __init__(
        self,
        usual: AttentionBackend,
        spec: AttentionSpec,
        pool: KVPool,
        pictures: Sequence[WholePicture],
        *,
        in_windows: bool,
    ) -> None:
        """Keep the pictures.  in_windows: only layers with a window see them whole."""
        self._usual = usual
        self._spec = spec
        self._pool = pool
        self._pictures = pictures
        self._in_windows = in_windows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH."""
        out_TNH = self._usual.attend(layer, q_TNH)
        if self._in_windows and not self._spec.window_of(layer):
            return out_TNH
        for one in self._pictures:
            part = slice(one.first, one.last)
            out_TNH[part] = self._attend(layer, q_TNH[part], one)
        return out_TNH

    def _attend(self, layer: int, q_nNH: Tensor, picture: WholePicture) -> Tensor:
        k_LGH, v_LGH = self._pool.read(layer, self._pool.own_slots(layer, picture.slots_L))
        mask_nL = None
        if window := self._spec.window_of(layer):
            positions_n = torch.arange(len(q_nNH), device=q_nNH.device)[:, None] + picture.start
            mask_nL = torch.arange(len(k_LGH), device=q_nNH.device) > positions_n - window
        q_NnH, k_GLH, v_GLH = (one.movedim(0, 1) for one in (q_nNH, k_LGH, v_LGH))
        out_NnH = F.scaled_dot_product_attention(
            q_NnH[None], k_GLH[None], v_GLH[None], mask_nL, scale=self._spec.scale, enable_gqa=True
        )
        return out_NnH[0].movedim(0, 1)
