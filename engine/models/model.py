"""What a rank runs: the surface that the loader, the runner and the graphs ask of a model, whoever computes it.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
Owns: the Protocol, and building what a shape names.  Does not know: layers, families, files.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.checkpoints.shape import DecoderShape
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.packing import Linears
from engine.layers.part import Attention
from engine.layers.pooled_head import PooledHead
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice


class Model(Protocol):
    """One rank's part of a model.  Run it under ``torch.inference_mode``.

    attention_spec: what the attention backend and the KV pool of this rank must fit.
    parameter_bytes: memory of this rank's weights as they are loaded.  weight_bytes: as they are laid out afterwards.
    doubled_bytes: of a table that is kept plain beside the layout that the LM head's kernel makes of it.
    linears_per_layer: how many of ``linear_shapes`` the first layer has.
    """

    dtype: torch.dtype
    vocab_size: int
    attention_spec: AttentionSpec
    parameter_bytes: int
    weight_bytes: int

    @property
    def pooled_head(self) -> PooledHead | None:
        """What stands in the LM head's place in a model that generates nothing; None in one that does."""
        ...

    @property
    def doubled_bytes(self) -> int: ...

    @property
    def linears_per_layer(self) -> int: ...

    def forward(self, step: StepTensors) -> Tensor:
        """Store the step's keys and values and return logits_NV for ``step.sample_at_N``; see ``logits``."""
        ...

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Store the step's keys and values and return x_TD of all tokens for ``logits``, or of the wanted rows of T."""
        ...

    def logits(self, x_ND: Tensor) -> Tensor:
        """logits_NV of rows that ``hidden`` has returned; float32, but where kernels sample: they read any dtype."""
        ...

    def normed(self, x_ND: Tensor) -> Tensor:
        """What the LM head reads of rows that ``hidden`` has returned: the model's last representation of them."""
        ...

    def slices(self) -> Iterator[WeightSlice]:
        """What this rank reads from a checkpoint.  Together the targets are all parameters, each element once."""
        ...

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """(outputs, inputs) of all weights of the layers in their order, and of the LM head; before they are packed."""
        ...

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Have ``read`` fill the slices of one layer after the other, each laid out for its kernels before the next:
        what was read is freed then if another layout replaces it.  ``slices`` is meaningless afterwards."""
        ...


def build_model(shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> Model:
    """This rank's part of the model of that shape, its parameters not initialised.  On the meta device it is a plan."""
    module, _, name = shape.built_by.partition(":")
    built: Any = getattr(import_module(module), name)
    model: Model = built(shape, comm, device, dtype)
    return model


def attention_spec_of(shape: DecoderShape, attentions: Sequence[Attention]) -> AttentionSpec:
    """What a rank's attention backend must compute.  attentions: of all layers."""
    attention = shape.layers[0].attention
    sinks = [one.sinks_Q for one in attentions]
    return AttentionSpec(
        num_layers=shape.num_layers,
        num_heads=attentions[0].num_queries,
        num_kv_heads=attentions[0].num_keys,
        head_size=shape.head_size,
        scale=attention.scale or shape.head_size**-0.5,
        window=shape.window,
        first_window_layer=shape.first_window_layer,
        full_layers=shape.full_layers,
        soft_cap=attention.soft_cap,
        sinks=tuple(one for one in sinks if one is not None),
        latent_size=attention.latent_size,
    )
