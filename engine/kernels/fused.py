"""All fused kernels as one object, which layers and inputs get.

Owns: the list.  Does not know: when they are used; ``choice.py`` decides that.
"""

import torch

from engine.kernels import activation, embedding, experts, heads, inputs, norm, page_lists, rotary, rounding, routing
from engine.kernels.recurrences import TritonRecurrences
from engine.layers.recurrences import Recurrences

SILU_OF_ONE = 0.731059


class FusedKernels:
    """Kernels for tensors of one device; each is one launch where torch needs several."""

    on_cpu = False
    add_norm = staticmethod(norm.add_norm)
    angle_table = staticmethod(rotary.angle_table)
    rotate_and_store = staticmethod(heads.rotate_and_store)
    gated = staticmethod(activation.gated)
    choose_experts = staticmethod(routing.choose_experts)
    mix_experts = staticmethod(experts.mix_experts)
    embed_shard = staticmethod(embedding.embed_shard)
    fill_inputs = staticmethod(inputs.fill_inputs)
    write_tokens = staticmethod(inputs.write_tokens)
    list_pages = staticmethod(page_lists.list_pages)
    round_rows = staticmethod(rounding.round_rows)
    add_norm_round = staticmethod(rounding.add_norm_round)
    gated_round = staticmethod(rounding.gated_round)
    widest_rounded = rounding.MAX_WIDTH
    recurrences: Recurrences | None = TritonRecurrences()

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def try_out(self) -> None:
        """Compile and run one kernel.  Raises triton's error if that fails; RuntimeError if the result is wrong."""
        found = float(self.gated(torch.ones((1, 2), device=self._device_type))[0, 0])
        if abs(found - SILU_OF_ONE) > 1e-3:
            raise RuntimeError(f"silu(1) gave {found}")
