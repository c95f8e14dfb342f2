"""Products with weights in oneDNN's layout, as one operation that a compiler leaves alone.

Inductor knows the product, but only with weights that are constants of the graph, and those would have to be compiled
anew for every layer.  As an operation of our own, the weight is an input like any other.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule

from engine.layers.packing import padded_product

_library = torch.library.Library("callboard_packed", "FRAGMENT")
_library.define("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")


def _linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    return padded_product(x_TI, packed, bias_O)


def _linear_traced(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], outputs))


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear, "MkldnnCPU")
_library.impl("linear", _linear_traced, "Meta")


def hide_packed_products(piece: GraphModule) -> None:
    """Replace them in a traced piece; its weights' shapes are still known there."""
    if not torch.backends.mkldnn.is_available():
        return
    product = torch.ops.mkldnn._linear_pointwise.default
    for node in piece.graph.nodes:
        if node.op == "call_function" and node.target is product:
            x, packed, bias, *_ = node.args
            node.target = torch.ops.callboard_packed.linear.default
            node.args = (x, packed, bias, packed.meta["example_value"].shape[0])
    piece.recompile()
