"""The weights of a decoder: the slices of a checkpoint that fill them, and their layout for the device's kernels.

Owns: the order in which weights are read and laid out.  Does not know: forward passes, files.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from engine.checkpoints.shape import DecoderShape
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear, VocabLinear
from engine.layers.packing import Linears
from engine.layers.part import Attention, ExactPart, FeedForward, Norm, Recurrent
from engine.layers.rounded import join_roundings
from engine.layers.summed_norm import leave_sums
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice, whole


class LayerWeights:
    """The weights of one layer.  parts: all parts.  products: those with linear layers, in the order of a pass.

    parallel: whether the MLP reads what attention reads.  takes_inserts: as in ``SummedLayer``."""

    attention: Attention | None
    mlp: FeedForward | None
    before_attention: Norm
    behind_attention: Norm
    before_mlp: Norm
    behind_mlp: Norm
    parallel: bool
    takes_inserts: bool = True
    parts: tuple[Norm | Attention | Recurrent | FeedForward, ...]
    products: tuple[Attention | Recurrent | FeedForward, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes, in the order of their products."""
        return tuple(linear for part in self.products for linear in part.linears)

    def pack(self, kernels: LayerKernels | None, linears: Linears) -> None:
        """Lay the weights out for the device and its kernels; called once, after loading."""
        for linear in self.linears:
            linear.pack(linears.layers)
        for part in self.parts:
            part.pack(kernels)
            if linears.exact is not None and isinstance(part, ExactPart):
                for linear in part.exacts:
                    linear.pack(linears.exact)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        for part in self.parts:
            yield from part.slices(prefix)


class DecoderWeights:
    """The weights of one rank's decoder, which builds them.

    parameter_bytes: memory of the weights as loaded.  weight_bytes: memory once they are laid out.
    positions: table of learned positions; None without.
    kernels: fused kernels; None before ``load``, and if torch computes."""

    shape: DecoderShape
    embedding: VocabLinear
    positions: Tensor | None
    layers: Sequence[LayerWeights]
    norm: Norm
    head: VocabLinear | TaskHead
    parameter_bytes: int
    weight_bytes: int
    kernels: LayerKernels | None

    @property
    def task_head(self) -> TaskHead | None:
        """The head of a model that generates nothing; None if it generates."""
        return self.head if isinstance(self.head, TaskHead) else None

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer that has it."""
        return [one for layer in self.layers if (one := layer.attention) is not None]

    @property
    def doubled_bytes(self) -> int:
        """Memory of the table that a tied LM head keeps in two layouts; 0 if the head is not tied."""
        return self.embedding.weight.nbytes if self.head is self.embedding else 0

    @property
    def linears_per_layer(self) -> int:
        """Number of linear layers in the first layer."""
        return len(self.layers[0].linears)

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices that this rank reads.  Together the targets are all parameters, each element once."""
        names = self.shape.names
        yield from self._table_slices()
        for index, layer in enumerate(self.layers):
            yield from layer.slices(f"{names.layers}.{index}")
        yield from self.norm.slices("")
        if self.head is not self.embedding:
            yield from self.head.slices(names.head)

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of all weights of the layers in order, and of the LM head; call before ``load``."""

        def shape(linear: Linear | TaskHead) -> tuple[int, int]:
            outputs, inputs = linear.weight.shape
            return outputs, inputs

        return [shape(linear) for layer in self.layers for linear in layer.linears], shape(self.head)

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the slices with ``read``, one layer after the other, and lay each layer out for its kernels before the
        next: the plain weights are freed if another layout replaces them.  Do not use ``slices`` afterwards.

        The LM head is laid out, too, although a tied one is then there twice, since the embedding reads its rows:
        it is a quarter of a small model's work.
        """
        self.kernels = kernels
        plain_bytes = self._linear_bytes()
        read(self._table_slices())
        if self.head is not self.embedding:
            self.embedding.pack_kept(linears.head)
        for index, layer in enumerate(self.layers):
            read(layer.slices(f"{self.shape.names.layers}.{index}"))
            layer.pack(kernels, linears)
        leave_sums(self.layers, kernels)
        join_roundings(self.layers, kernels)
        read(self.norm.slices(""))
        self.norm.pack(kernels)
        if self.head is not self.embedding:
            read(self.head.slices(self.shape.names.head))
        self.head.pack(linears.head, keep_weight=self.head is self.embedding)
        self.weight_bytes += self._linear_bytes() - plain_bytes

    def _linear_bytes(self) -> int:
        linears = [self.embedding, *(linear for layer in self.layers for linear in layer.linears)]
        own_head = 0 if self.head is self.embedding else self.head.nbytes
        return own_head + sum(linear.nbytes for linear in linears)

    def kept_weights(self, *, with_embedding: bool) -> Iterator[Tensor]:
        """Yield the weights that ``load`` lays out, whose rows need not be filled if a kernel takes them as stored."""
        if with_embedding:
            yield self.embedding.weight
        if isinstance(self.head, VocabLinear) and self.head is not self.embedding:
            yield self.head.weight
        for layer in self.layers:
            yield from (linear.weight for linear in layer.linears)

    def _table_slices(self) -> Iterator[WeightSlice]:
        yield from self.embedding.slices(self.shape.names.embedding)
        if self.positions is not None:
            yield whole(f"{self.shape.names.positions}.weight", self.positions)
