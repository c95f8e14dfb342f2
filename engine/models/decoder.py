"""The dense decoder that all families share: embedding, layers of attention and gated MLP, norm, LM head.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        A query and key heads · Q query heads · G key/value heads (of this rank) · H head size
Owns: the order of operations.  Does not know: families, files, the scheduler, which attention backend runs.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.embedding import VocabLinear
from engine.layers.linear import ColumnLinear, QKVLinear, RowLinear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import Rotary
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice
from engine.models.frequencies import frequencies
from engine.models.shape import DecoderShape


class DecoderLayer:
    """One layer, in two halves around the attention call, so that each half can be captured as a graph."""

    def __init__(self, shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        hidden, heads = shape.hidden_size, shape.num_heads * shape.head_size
        self.input_norm = RMSNorm(hidden, shape.norm_eps, device, dtype)
        self.qkv = QKVLinear(
            hidden, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.qkv_bias, comm, device, dtype
        )
        self.num_queries = self.qkv.num_heads
        self.num_rotated = self.qkv.num_heads + self.qkv.num_kv_heads
        self.head_shape = (self.num_rotated + self.qkv.num_kv_heads, shape.head_size)
        self.head_norm = None
        if shape.qk_norm:
            self.head_norm = HeadNorm(
                self.num_queries, self.qkv.num_kv_heads, shape.head_size, shape.norm_eps, device, dtype
            )
        self.output = RowLinear(heads, hidden, shape.output_bias, comm, device, dtype)
        self.mlp_norm = RMSNorm(hidden, shape.norm_eps, device, dtype)
        parts = [("gate_proj", shape.intermediate_size), ("up_proj", shape.intermediate_size)]
        self.gate_up = ColumnLinear(hidden, parts, shape.mlp_bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden, shape.mlp_bias, comm, device, dtype)

    def project(self, x_TD: Tensor, rotary: Rotary, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q_TQH, k_TGH, v_TGH, normalised and rotated."""
        heads = self.qkv(self.input_norm(x_TD)).view(-1, *self.head_shape)
        qk_TAH, v_TGH = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.head_norm is not None:
            qk_TAH = self.head_norm(qk_TAH)
        qk_TAH = rotary.rotate(qk_TAH, angles)
        return qk_TAH[:, : self.num_queries], qk_TAH[:, self.num_queries :], v_TGH

    def finish(self, x_TD: Tensor, attended_TQH: Tensor) -> Tensor:
        """Add the attention's result and the MLP to the residual stream, in place."""
        x_TD.add_(self.output(attended_TQH.flatten(1)))
        gate_TI, up_TI = self.gate_up(self.mlp_norm(x_TD)).chunk(2, -1)
        return x_TD.add_(self.down(F.silu(gate_TI).mul_(up_TI)))

    def pack(self) -> None:
        """Lay the weights out for the device; called once, after loading."""
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.pack()
        for norm in (self.input_norm, self.mlp_norm, self.head_norm):
            if norm is not None:
                norm.pack()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this layer reads from a checkpoint."""
        yield from self.input_norm.slices(f"{prefix}.input_layernorm")
        yield from self.qkv.slices(f"{prefix}.self_attn")
        if self.head_norm is not None:
            yield from self.head_norm.slices(f"{prefix}.self_attn")
        yield from self.output.slices(f"{prefix}.self_attn.o_proj")
        yield from self.mlp_norm.slices(f"{prefix}.post_attention_layernorm")
        yield from self.gate_up.slices(f"{prefix}.mlp")
        yield from self.down.slices(f"{prefix}.mlp.down_proj")


class Decoder:
    """One rank's part of the model.  Run it under ``torch.inference_mode``: it writes in place and keeps no gradients.

    attention_spec: what the attention backend and the KV pool of this rank must fit.
    parameter_bytes: memory of this rank's weights as they are loaded.
    """

    def __init__(self, shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.vocab_size = shape.vocab_size
        self.embedding = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.layers = [DecoderLayer(shape, comm, device, dtype) for _ in range(shape.num_layers)]
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, device, dtype)
        self.head = self.embedding
        if not shape.tied:
            self.head = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.rotary = Rotary(
            frequencies(shape.rotary, shape.head_size).to(device), shape.rotary.attention_factor, dtype
        )
        self.attention_spec = AttentionSpec(
            num_layers=shape.num_layers,
            num_heads=self.layers[0].qkv.num_heads,
            num_kv_heads=self.layers[0].qkv.num_kv_heads,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5,
            window=shape.window,
            first_window_layer=shape.first_window_layer,
        )
        self.parameter_bytes = sum(one.target.nbytes for one in self.slices())

    def forward(self, step: StepTensors) -> Tensor:
        """Store the step's keys and values and return logits_NV, float32, for ``step.sample_at_N``."""
        x_TD = self.embedding.embed(step.token_ids_T)
        angles = self.rotary.angles(step.positions_T)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            q_TQH, k_TGH, v_TGH = layer.project(x_TD, self.rotary, angles)
            step.pool.store(index, k_TGH, v_TGH, step.slots_T)
            attended_TQH = step.attention.attend(index, q_TQH)
            if index == last:
                # Nothing reads the other rows any more: a prefill saves most of its last layer.
                x_TD = x_TD.index_select(0, step.sample_at_N)
                attended_TQH = attended_TQH.index_select(0, step.sample_at_N)
            x_TD = layer.finish(x_TD, attended_TQH)
        return self.head.logits(self.norm(x_TD))

    def slices(self) -> Iterator[WeightSlice]:
        """What this rank reads from a checkpoint.  Together the targets are all parameters, each element once."""
        yield from self.embedding.slices("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.slices(f"model.layers.{index}")
        yield from self.norm.slices("model.norm")
        if self.head is not self.embedding:
            yield from self.head.slices("lm_head")

    def pack(self) -> None:
        """Lay the weights out for the device; called once, after loading.  ``slices`` is meaningless then.

        The LM head is packed as well although a tied one, whose rows the embedding reads, is then there twice:
        it is a quarter of a small model's work.
        """
        for layer in self.layers:
            layer.pack()
        self.norm.pack()
        self.head.pack(keep_weight=self.head is self.embedding)
