"""The interface of a model on one rank, which the loader, the runner and the graphs use.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
Owns: the Protocol, and building the class that a shape names.  Does not know: layers, families, files.
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
from engine.layers.step import StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice


class Model(Protocol):
    """One rank's part of a model.  Run it under ``torch.inference_mode``.

    attention_spec: the attention that the backend and the KV pool of this rank must fit.
    parameter_bytes: memory of this rank's weights as loaded.  weight_bytes: memory once they are laid out.
    doubled_bytes: memory of a table that stays plain although the LM head's kernel has it in another layout, too.
    linears_per_layer: number of the first layer's entries in ``linear_shapes``.
    """

    dtype: torch.dtype
    vocab_size: int
    attention_spec: AttentionSpec
    parameter_bytes: int
    weight_bytes: int

    @property
    def task_head(self) -> TaskHead | None:
        """The head of a model that generates nothing; None if it generates."""
        ...

    @property
    def doubled_bytes(self) -> int: ...

    @property
    def linears_per_layer(self) -> int: ...

    def forward(self, step: StepTensors) -> Tensor:
        """Store the step's keys and values and return logits_NV for ``step.sample_at_N`` (``logits``)."""
        ...

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Store the step's keys and values and return x_TD, the input of ``logits``, or its ``wanted_N`` rows."""
        ...

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return logits_NV of rows from ``hidden``: float32, or the model's dtype if kernels sample."""
        ...

    def normed(self, x_ND: Tensor) -> Tensor:
        """Return the LM head's input for rows from ``hidden``: the model's last representation of them."""
        ...

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices that this rank reads.  Together the targets are all parameters, each element once."""
        ...

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of all weights of the layers in order, and of the LM head; call before ``load``."""
        ...

    def kept_weights(self, *, with_embedding: bool) -> Iterator[Tensor]:
        """Yield the weights that ``load`` lays out, whose rows need not be filled if a kernel takes them as stored."""
        ...

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the slices with ``read``, one layer after the other, and lay each layer out for its kernels before the
        next: the plain weights are freed if another layout replaces them.  Do not use ``slices`` afterwards."""
        ...


def build_model(shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> Model:
    """Build this rank's part of the model of that shape, not initialised; on the meta device it only plans."""
    module, _, name = shape.built_by.partition(":")
    built: Any = getattr(import_module(module), name)
    model: Model = built(shape, comm, device, dtype)
    return model


def attention_spec_of(shape: DecoderShape, attentions: Sequence[Attention]) -> AttentionSpec:
    """Return the attention that a rank's backend must compute.  attentions: of all layers that have it."""
    attention = shape.attentions[0]
    sinks = [one.sinks_Q for one in attentions]
    return AttentionSpec(
        num_layers=len(attentions),
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
        chunked=any(one.chunked for one in shape.attentions),
    )
