"""Multi-head latent attention (DeepSeek-AI 2024), computed in the space of latents for prompts and decodes alike.

Legend: T new tokens in the step (ragged, packed) · D model dim · Q query heads of this rank · C latent size
        R rotary size · P plain size of a query · V value size · H of what is compared, C + R
Owns: projections, rotation, storing latents, and the maps into and out of the space of latents.
Does not know: which backend attends, the residual stream, which model it is in.

A head's key is W_k times the latent, so the score of a query q is that of W_k^T q with the latent; and a sum of values
is W_v times the sum of latents.  So all heads share one key of H numbers, whose first C are the value.
Every rank keeps the latents of all tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import LatentAttentionShape, share
from engine.layers.comm import Comm, NormingComm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice, joined, not_here, parameter, whole

LATENT = "kv_a_proj_with_mqa"


class LatentAttention:
    """An ``Attention`` over latents.  expand_QEC: W_k and W_v of each head, stacked along E; it is never rounded."""

    num_keys = 1
    sinks_Q: Tensor | None = None

    def __init__(
        self, shape: LatentAttentionShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.comm = comm
        self.num_queries = share(shape.num_heads, comm.size, "num_attention_heads")
        place = (device, dtype)
        query = ("q_b_proj" if shape.query_rank else "q_proj", shape.num_heads * (shape.plain_size + shape.rotary_size))
        latent = (LATENT, shape.head_size)
        # With a query_rank, the first outputs of this product are the compressed queries.
        inward = [("q_a_proj", shape.query_rank), latent] if shape.query_rank else [latent]
        self.inward = ColumnLinear(hidden_size, inward, shape.bias, None, *place)
        self.query_norm: RMSNorm | None = None
        if shape.query_rank:
            self.query_norm = RMSNorm(shape.query_rank, shape.eps, *place, name="q_a_layernorm")
        self.query = ColumnLinear(shape.query_rank or hidden_size, [query], False, comm, *place)
        self.latent_norm = RMSNorm(shape.latent_size, shape.eps, *place, name="kv_a_layernorm")
        outputs = shape.plain_size + shape.value_size
        self.expand_QEC = parameter(self.num_queries, outputs, shape.latent_size, device=device, dtype=dtype)
        self.output_linear = RowLinear(shape.num_heads * shape.value_size, hidden_size, shape.bias, comm, *place)
        self.linears = (self.inward, self.query, self.output_linear)

    def project(
        self,
        index: int,
        normed_TD: Tensor,
        rotary: Rotary | None,
        angles: tuple[Tensor, ...],
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """Return the queries in the space of latents and store the step's latents (``Attention.project``)."""
        shape = self.shape
        inward_TI = self.inward(normed_TD)
        latent_TC, key_TR = inward_TI[:, shape.query_rank :].split((shape.latent_size, shape.rotary_size), -1)
        key_T1R = key_TR[:, None] if rotary is None else rotary.rotate(key_TR[:, None], angles)
        kept = (self.latent_norm(latent_TC)[:, None], key_T1R)
        step.pool.store_latents(index, torch.cat(kept, -1), step.slots_T)
        source_TI = self.query_norm(inward_TI[:, : shape.query_rank]) if self.query_norm else normed_TD
        heads_TQX = self.query(source_TI).view(-1, self.num_queries, shape.plain_size + shape.rotary_size)
        plain_TQP, query_TQR = heads_TQX.split((shape.plain_size, shape.rotary_size), -1)
        latent_QTC = plain_TQP.transpose(0, 1) @ self.expand_QEC[:, : shape.plain_size]
        query_TQR = query_TQR if rotary is None else rotary.rotate(query_TQR, angles)
        return torch.cat((latent_QTC.transpose(0, 1), query_TQR), -1)

    def output(self, attended_TQH: Tensor) -> Tensor:
        """Map sums of latents to values and project them (``Attention.output``)."""
        values_QTV = attended_TQH.transpose(0, 1) @ self.expand_QEC[:, self.shape.plain_size :].mT
        return self.output_linear(values_QTV.transpose(0, 1).flatten(1))

    def leave_sum(self) -> NormingComm | None:
        return self.output_linear.leave_sum()

    def pack(self, kernels: LayerKernels | None) -> None:
        if self.query_norm is not None:
            self.query_norm.pack(kernels)
        self.latent_norm.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = joined(prefix, self.shape.name)
        yield from self.inward.slices(name)
        if self.query_norm is not None:
            yield from self.query_norm.slices(name)
        yield from self.query.slices(name)
        yield from self.latent_norm.slices(name)
        yield from self._expanding(name)
        yield from self.output_linear.slices(f"{name}.o_proj")

    def _expanding(self, name: str) -> Iterator[WeightSlice]:
        rank = self.comm.rank
        if self.shape.split:
            for head in range(self.shape.num_heads):
                mine = head - rank * self.num_queries
                both_EC = self.expand_QEC[mine if 0 <= mine < self.num_queries else 0]
                kinds = {"k": both_EC[: self.shape.plain_size].t(), "v": both_EC[self.shape.plain_size :]}
                parts = (whole(f"{name}.{kind}_b_proj.{head}.weight", one) for kind, one in kinds.items())
                yield from parts if 0 <= mine < self.num_queries else not_here(parts)
            return
        expand_OC = self.expand_QEC.flatten(0, 1)
        rows, columns = expand_OC.shape
        total = (rows * self.comm.size, columns)
        yield WeightSlice(f"{name}.kv_b_proj.weight", total, 0, rank * rows, rows, expand_OC)
