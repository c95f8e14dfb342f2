"""A decoder computed by transformers' own class, with this engine's pages, attention and linear layers.

All tokens of a step are one row of a batch of one, with their positions.  Only attention depends on other tokens; its
calls, which transformers makes under this engine's name, are answered here, by one object per layer.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        Q query heads · G key/value heads · H head size
Owns: the model as a rank holds it.  Does not know: architectures, files, the scheduler, which attention backend runs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.checkpoints.through_transformers import ThroughTransformers
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm, Unconnected
from engine.layers.kernels import LayerKernels
from engine.layers.packing import Linears
from engine.layers.step import StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice, whole
from engine.models.through_transformers.attention import ANSWERER, Call, probe
from engine.models.through_transformers.linear import LinearProduct, same_inputs, swap_linears
from engine.models.through_transformers.module import (
    ATTENTION,
    allocate,
    body_of,
    head_of,
    make_module,
    refusals,
    tensors_of,
)
from engine.models.through_transformers.names import in_checkpoint
from engine.types.errors import ConfigError

NUMBERED = re.compile(r".*?\.\d+(?=\.|$)")  # the name of a layer, at the beginning of a tensor's


class TransformersDecoder:
    """A ``Model`` that runs a class of transformers."""

    def __init__(self, shape: ThroughTransformers, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.vocab_size = shape.vocab_size
        meta = torch.device("meta")
        plan = _Plan(shape, Unconnected(comm.rank, comm.size), meta, meta, dtype)
        calls = plan.calls(shape)
        names = {id(one): name for name, one in (*plan.module.named_modules(), *plan.module.named_parameters())}
        if device.type != "meta":
            plan = _Plan(shape, comm, torch.device("cpu"), device, dtype, plan.joined)
        module = self._module = plan.module
        allocate(module, device, dtype)
        self._tables, self._tied = module.get_input_embeddings(), plan.tied
        self._head = plan.linears.pop(plan.head)
        self._linears = plan.linears
        if self._tied:
            self._head.linear.weight = self._tables.weight
        sinks = [module.get_parameter(names[id(call.sinks)]) for call in calls if call.sinks is not None]
        self.attention_spec = _attention_spec(shape, calls, comm, sinks)
        self._step: StepTensors | None = None
        self._tables.register_forward_hook(self._with_inserts)
        for layer, call in enumerate(calls):
            module.get_submodule(names[id(call.module)]).__dict__[ANSWERER] = _Layer(self, layer, call)
        module.config._attn_implementation = ATTENTION
        body = body_of(module)
        self._body: Callable[..., Any] = body.forward
        # The head's class runs with the body's output as its body, so its own changes to logits still apply.
        body.forward = _given
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())
        self._kernels: LayerKernels | None = None

    @property
    def step(self) -> StepTensors:
        """The running step."""
        assert self._step is not None, "attention was called outside of a step"
        return self._step

    @property
    def task_head(self) -> TaskHead | None:
        """Always None: a checkpoint with a task head is refused when it is read."""
        return None

    @property
    def doubled_bytes(self) -> int:
        """Memory of the table that a tied LM head keeps in two layouts; 0 if the head is not tied."""
        return self._head.linear.weight.nbytes if self._tied else 0

    @property
    def linears_per_layer(self) -> int:
        """Number of linear layers per layer."""
        return len(self._linears) // self.attention_spec.num_layers

    def forward(self, step: StepTensors) -> Tensor:
        return self.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Store keys and values and return x_TD, or its ``wanted_N`` rows, with the body's last norm applied."""
        self._step = step
        output = self._body(input_ids=step.token_ids_T[None], position_ids=step.positions_T[None], use_cache=False)
        self._step = None
        x_TD: Tensor = output.last_hidden_state[0]
        return x_TD if wanted_N is None else x_TD.index_select(0, wanted_N)

    def _with_inserts(self, table: nn.Module, given: Any, embedded: Tensor) -> Tensor | None:
        """Return the embeddings of a step with its inserts; None for a step that has none."""
        if self._step is None or self._step.inserts is None:
            return None
        return self._step.inserts.embed(embedded[0])[None]

    def logits(self, x_ND: Tensor) -> Tensor:
        logits_NV: Tensor = self._module(inputs_embeds=x_ND[None], use_cache=False).logits[0]
        return logits_NV.float() if self._kernels is None else logits_NV

    def normed(self, x_ND: Tensor) -> Tensor:
        """Return the rows, which are normed already."""
        return x_ND

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this rank reads."""
        for _, slices in self._groups():
            yield from slices

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of the layers' weights, and of the LM head; call before ``load``."""

        def shape(one: LinearProduct) -> tuple[int, int]:
            outputs, inputs = one.linear.weight.shape
            return outputs, inputs

        return [shape(one) for one in self._linears.values()], shape(self._head)

    def kept_weights(self, *, with_embedding: bool) -> Iterator[Tensor]:
        """Yield none: the formats of rounded rows are read for families of callboard's own."""
        return iter(())

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the weights with ``read`` and lay them out for their kernels (``Model.load``)."""
        self._kernels = kernels
        plain_bytes = self._linear_bytes()
        for group, slices in self._groups():
            read(iter(slices))
            for name, one in self._linears.items():
                if _group(name) == group:
                    one.linear.pack(linears.layers)
        self._head.linear.pack(linears.head, keep_weight=self._tied)
        self.weight_bytes += self._linear_bytes() - plain_bytes

    def _linear_bytes(self) -> int:
        return sum(one.linear.nbytes for one in (self._head, *self._linears.values()))

    def _groups(self) -> Iterator[tuple[str, list[WeightSlice]]]:
        """Yield the slices of each layer with the layer's name; '' for the rest of the model."""
        groups: dict[str, dict[str, WeightSlice]] = {}
        linears = (*self._linears.values(), *(() if self._tied else (self._head,)))
        own = (one for linear in linears for one in linear.slices())
        for one in (*(whole(name, tensor) for name, tensor in tensors_of(self._module)), *own):
            groups.setdefault(_group(one.source), {})[one.source] = one
        for group, slices in groups.items():
            stored = in_checkpoint(self._module, {name: one.target for name, one in slices.items()})
            cut = {id(one.target): one for one in slices.values()}
            yield group, [_renamed(cut.get(id(tensor)), name, tensor) for name, tensor in stored.items()]


class _Plan:
    """A rank's module before its tensors are allocated, with its linear layers swapped.

    linears: products by the name of their first linear layer, the head's included.
    head: name of the head.  tied: whether its weight is the embedding's.
    joined: the result of ``same_inputs``."""

    def __init__(
        self,
        shape: ThroughTransformers,
        comm: Comm,
        origin: torch.device,
        device: torch.device,
        dtype: torch.dtype,
        joined: list[tuple[str, ...]] | None = None,
    ) -> None:
        """Make the module.  joined: None to find it by running the module, which must then be on the meta device."""
        self.module = make_module(shape.architecture, {**shape.config, "tie_word_embeddings": shape.tied}, origin)
        if joined is None:
            with refusals(shape.architecture, "it cannot be run without weights"), same_inputs(self.module) as joined:
                probe(self.module, body_of(self.module), shape.max_len)
        self.joined = joined
        head = head_of(self.module)
        self.tied = head.weight is self.module.get_input_embeddings().weight
        self.head = next(name for name, one in self.module.named_modules() if one is head)
        self.linears = swap_linears(self.module, comm, device, dtype, self.joined)

    def calls(self, shape: ThroughTransformers) -> tuple[Call, ...]:
        """Return this rank's attention calls; the module must be on the meta device."""
        with refusals(shape.architecture, "with its linear layers swapped it fails"):
            calls = probe(self.module, body_of(self.module), shape.max_len)
        assert len(calls) == shape.num_layers, f"{len(calls)} calls of attention, {shape.num_layers} were expected"
        return calls


class _Layer:
    """Answers the attention calls of one module."""

    def __init__(self, decoder: TransformersDecoder, layer: int, call: Call) -> None:
        spec = decoder.attention_spec
        self._decoder, self._layer, self._dtype = decoder, layer, decoder.dtype
        self._factor = call.scale / spec.scale  # backends have one scale for all layers
        self._head_size, self._value_size = spec.head_size, call.value_size
        self._copies = spec.num_kv_heads // call.num_kv_heads

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Tensor:
        """Store keys and values and return [1, T, Q, value size] (``attention.attend``)."""
        step = self._decoder.step
        q_TQH, k_TGH, v_TGH = (self._padded(one[0].transpose(0, 1).to(self._dtype)) for one in (query, key, value))
        if self._copies > 1:  # of each head, next to each other: a query still finds its own
            k_TGH, v_TGH = (one.repeat_interleave(self._copies, 1) for one in (k_TGH, v_TGH))
        if self._factor != 1.0:
            q_TQH = q_TQH * self._factor
        step.pool.store(self._layer, k_TGH.contiguous(), v_TGH.contiguous(), step.slots_T)
        out_TQH = step.attention.attend(self._layer, q_TQH.contiguous())
        return out_TQH[None, ..., : self._value_size].to(query.dtype)

    def _padded(self, heads_TNH: Tensor) -> Tensor:
        """Return heads of the pool's size; zeros at their end change no score."""
        padding = self._head_size - heads_TNH.shape[-1]
        return F.pad(heads_TNH, (0, padding)) if padding else heads_TNH


class _Output(BaseModelOutputWithPast):
    """A body's output; every attribute that a head's class may look for besides is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _given(*_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
    """Return the output of a body that has run already, as its forward pass."""
    return _Output(last_hidden_state=inputs_embeds)


def _attention_spec(
    shape: ThroughTransformers, calls: Sequence[Call], comm: Comm, sinks: Sequence[Tensor]
) -> AttentionSpec:
    first = calls[0]
    if sinks and comm.size > 1:
        raise ConfigError(
            f"device.tensor_parallel={comm.size}: {shape.architecture} has attention sinks, which are not "
            "shared through transformers; set it to 1"
        )
    return AttentionSpec(
        num_layers=shape.num_layers,
        num_heads=first.num_heads,
        num_kv_heads=max(one.num_kv_heads for one in calls),
        head_size=shape.head_size,
        scale=first.scale,
        window=shape.window,
        first_window_layer=shape.first_window_layer,
        full_layers=shape.full_layers,
        soft_cap=first.soft_cap,
        sinks=tuple(sinks),
    )


def _group(name: str) -> str:
    """Return the name of a tensor's layer; '' if it is in none."""
    found = NUMBERED.match(name)
    return found.group() if found else ""


def _renamed(cut: WeightSlice | None, name: str, tensor: Tensor) -> WeightSlice:
    return whole(name, tensor) if cut is None else replace(cut, source=name)
