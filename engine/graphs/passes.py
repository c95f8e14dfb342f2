"""Passes over the pieces of a traced model, before they are compiled: the engine's first, then those of plugins.

A piece consists of torch's own operations, in-place ones included: nothing has been made functional yet.  So a pass may
insert an operation that writes in place; Inductor makes pieces functional and reverts that later, without a copy.

Owns: their order, what they must not change, the products that are hidden from a compiler.
Does not know: where pieces come from, compilers.
"""

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.fx import GraphModule

from engine.plugins.hookspecs import GraphPassContext
from engine.plugins.kinds import GRAPH_PASS
from engine.plugins.linear.onednn import fewest_rows, padded_product
from engine.plugins.manager import Plugins
from engine.types.errors import GraphError

log = logging.getLogger(__name__)


@runtime_checkable
class GraphPass(Protocol):
    """The result of a graph pass plugin's hook."""

    def __call__(self, piece: GraphModule) -> None:
        """Change ``piece.graph`` in place, using the graph alone: equal pieces, such as layers, are passed once.

        Inputs and outputs must not change.  A node's ``meta["example_value"]`` has its shape and dtype."""
        ...


class PassManager:
    """Runs passes in order.  passes: (name for errors, pass)."""

    def __init__(self, passes: Sequence[tuple[str, GraphPass]]) -> None:
        self._passes = tuple(passes)

    def run(self, piece: GraphModule) -> None:
        """Run all passes on a piece.  Raises GraphError that names the pass that failed, or broke the piece."""
        for name, one in self._passes:
            interface, num_before = _interface(piece), len(piece.graph.nodes)
            try:
                one(piece)
                piece.graph.lint()
                piece.recompile()
                assert _interface(piece) == interface, "it changed what the piece takes or returns"
            except Exception as error:  # a plugin's code may raise any error
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise GraphError(
                    f"graphs.mode=compiled: graph pass {name} failed ({problem}); take it out of plugins.graph_passes"
                ) from error
            log.debug("graph pass %s: %d operations became %d", name, num_before, len(piece.graph.nodes))


def build_passes(plugins: Plugins, device: torch.device, dtype: torch.dtype) -> list[tuple[str, GraphPass]]:
    """Build the passes that the configuration names.  Raises PluginError."""
    passes = []
    for name in plugins.several.get(GRAPH_PASS, ()):
        context = GraphPassContext(device.type, str(dtype).removeprefix("torch."))
        passes.append((name, plugins.build(name, context, GraphPass)))
    return passes


def _interface(piece: GraphModule) -> tuple[object, ...]:
    inputs = tuple(node.name for node in piece.graph.nodes if node.op == "placeholder")
    (output,) = piece.graph.find_nodes(op="output")
    returned = output.args[0]
    return inputs, len(returned) if isinstance(returned, (tuple, list)) else None


# Products with weights in oneDNN's layout, as one operation that a compiler leaves alone.  Inductor compiles them only
# if weights are constants of the graph, and then each layer by itself.
_library = torch.library.Library("callboard_packed", "FRAGMENT")
_library.define("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")


def _linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    return padded_product(x_TI, packed, bias_O, fewest_rows(x_TI.itemsize * x_TI.shape[1] * outputs))


def _linear_traced(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], outputs))


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear, "MkldnnCPU")
_library.impl("linear", _linear_traced, "Meta")


def hide_packed_products(piece: GraphModule) -> None:
    """Replace packed products (``GraphPass``); here the shapes of weights are still known."""
    if not torch.backends.mkldnn.is_available():
        return
    product = torch.ops.mkldnn._linear_pointwise.default
    for node in piece.graph.find_nodes(op="call_function", target=product):
        x, packed, bias, *_ = node.args
        node.target = torch.ops.callboard_packed.linear.default
        node.args = (x, packed, bias, packed.meta["example_value"].shape[0])
