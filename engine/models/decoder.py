"""The dense decoder that all families share: embedding, layers of attention and gated MLP, norm, LM head.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        A query and key heads · Q query heads · G key/value heads (of this rank) · H head size
Owns: the order of operations.  Does not know: families, files, the scheduler, which attention backend runs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.checkpoints.shape import DecoderShape
from engine.layers.activation import gated
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.embedding import VocabLinear
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, Linear, QKVLinear, RowLinear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.packing import LinearKernel, Linears
from engine.layers.rotary import Rotary
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice
from engine.models.frequencies import frequencies


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
        self.activation = shape.activation
        self.down = RowLinear(shape.intermediate_size, hidden, shape.mlp_bias, comm, device, dtype)

    def project(
        self,
        index: int,
        normed_TD: Tensor,
        rotary: Rotary,
        angles: tuple[Tensor, ...],
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """q_TQH, normalised and rotated; keys and values are in the pool afterwards."""
        heads = self.qkv(normed_TD).view(-1, *self.head_shape)
        if kernels is not None:
            (table_TH,), norm = angles, self.head_norm
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            keys, values = step.pool.keys(index), step.pool.values(index)
            return kernels.rotate_and_store(heads, weight, eps, table_TH, keys, values, step.slots_T)
        qk_TAH, v_TGH = heads[:, : self.num_rotated], heads[:, self.num_rotated :]
        if self.head_norm is not None:
            qk_TAH = self.head_norm(qk_TAH)
        qk_TAH = rotary.rotate(qk_TAH, angles)
        step.pool.store(index, qk_TAH[:, self.num_queries :], v_TGH, step.slots_T)
        return qk_TAH[:, : self.num_queries]

    def finish(self, x_TD: Tensor, attended_TQH: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Add the attention's result to the residual stream, in place, and return the MLP's, which is to be added."""
        normed_TD = self.mlp_norm.added(x_TD, self.output(attended_TQH.flatten(1)), kernels)
        return self.down(gated(self.gate_up(normed_TD), self.activation, kernels))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        return self.qkv, self.output, self.gate_up, self.down

    def pack(self, kernels: LayerKernels | None, kernel: LinearKernel) -> None:
        """Lay the weights out for the device and its kernels; called once, after loading."""
        for linear in self.linears:
            linear.pack(kernel)
        for norm in (self.input_norm, self.mlp_norm, self.head_norm):
            if norm is not None:
                norm.pack(kernels)

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
    parameter_bytes: memory of this rank's weights as they are loaded.  weight_bytes: as they are laid out afterwards.
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
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())
        self._kernels: LayerKernels | None = None

    def forward(self, step: StepTensors) -> Tensor:
        """Store the step's keys and values and return logits_NV for ``step.sample_at_N``; see ``logits``."""
        return self.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Store the step's keys and values and return x_TD of all tokens for ``logits``, or of the wanted rows of T."""
        # A compiler fuses by itself, and better what it can see.
        kernels = None if self._kernels is None or torch.compiler.is_compiling() else self._kernels
        x_TD = self.embedding.embed(step.token_ids_T, kernels)
        angles = self.rotary.angles(step.positions_T, kernels)
        last = len(self.layers) - 1
        update_TD = None
        for index, layer in enumerate(self.layers):
            if update_TD is None:
                normed_TD = layer.input_norm(x_TD)
            else:
                normed_TD = layer.input_norm.added(x_TD, update_TD, kernels)
            q_TQH = layer.project(index, normed_TD, self.rotary, angles, step, kernels)
            attended_TQH = step.attention.attend(index, q_TQH)
            if index == last and wanted_N is not None:
                # Nothing reads the other rows any more: a prefill saves most of its last layer.
                x_TD = x_TD.index_select(0, wanted_N)
                attended_TQH = attended_TQH.index_select(0, wanted_N)
            update_TD = layer.finish(x_TD, attended_TQH, kernels)
        return x_TD if update_TD is None else x_TD.add_(update_TD)

    def logits(self, x_ND: Tensor) -> Tensor:
        """logits_NV of rows that ``hidden`` has returned; float32, but where kernels sample: they read any dtype."""
        return self.head.logits(self.norm(x_ND), as_float32=self._kernels is None)

    def normed(self, x_ND: Tensor) -> Tensor:
        """What the LM head reads of rows that ``hidden`` has returned: the model's last representation of them."""
        return self.norm(x_ND)

    def slices(self) -> Iterator[WeightSlice]:
        """What this rank reads from a checkpoint.  Together the targets are all parameters, each element once."""
        yield from self.embedding.slices("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.slices(f"model.layers.{index}")
        yield from self.norm.slices("model.norm")
        if self.head is not self.embedding:
            yield from self.head.slices("lm_head")

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """(outputs, inputs) of all weights of the layers in their order, and of the LM head; before they are packed."""

        def shape(linear: Linear) -> tuple[int, int]:
            outputs, inputs = linear.weight.shape
            return outputs, inputs

        return [shape(linear) for layer in self.layers for linear in layer.linears], shape(self.head)

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Have ``read`` fill the slices of one layer after the other, each laid out for its kernels before the next:
        what was read is freed then if another layout replaces it.  ``slices`` is meaningless afterwards.

        The LM head is packed as well although a tied one, whose rows the embedding reads, is then there twice:
        it is a quarter of a small model's work.
        """
        self._kernels = kernels
        plain_bytes = self._linear_bytes()
        read(self.embedding.slices("model.embed_tokens"))
        for index, layer in enumerate(self.layers):
            read(layer.slices(f"model.layers.{index}"))
            layer.pack(kernels, linears.layers)
        read(self.norm.slices("model.norm"))
        self.norm.pack(kernels)
        if self.head is not self.embedding:
            read(self.head.slices("lm_head"))
        self.head.pack(linears.head, keep_weight=self.head is self.embedding)
        self.weight_bytes += self._linear_bytes() - plain_bytes

    def _linear_bytes(self) -> int:
        return self.head.nbytes + sum(linear.nbytes for layer in self.layers for linear in layer.linears)
