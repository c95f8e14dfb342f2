"""A traced model cut at its split operations: pieces to compile, and between them operations that run as they are.

Legend: T rows of the run · N query heads · H head size
Owns: the marks for attention and collectives, which do nothing and show where to cut; the equality of pieces.
Does not know: compilers, what replaces an operation.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from engine.layers.attention import AttentionBatch


@torch.library.custom_op("callboard::attend", mutates_args=("out",))
def _attend(q: Tensor, out: Tensor, layer: int) -> None:
    """Mark attention of a layer, which writes ``out``."""
    raise AssertionError("a mark was run: the traced model was not split here")


@torch.library.custom_op("callboard::all_reduce", mutates_args=("tensor",))
def _all_reduce(tensor: Tensor) -> None:
    """Mark the sum over ranks, in place."""
    raise AssertionError("a mark was run: the traced model was not split here")


@_attend.register_fake
def _attend_traced(q: Tensor, out: Tensor, layer: int) -> None:
    return None


@_all_reduce.register_fake
def _all_reduce_traced(tensor: Tensor) -> None:
    return None


ATTEND = "callboard::attend"
ALL_REDUCE = "callboard::all_reduce"


class MarkedAttention:
    """An ``AttentionBackend`` that puts a mark at each layer's attention.  value_size: size of its results; 0
    for as many as its query has."""

    def __init__(self, value_size: int) -> None:
        self._value_size = value_size

    def plan_step(self, batch: AttentionBatch) -> None:
        """Do nothing: a trace has no plan."""

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return an empty tensor, which the operation in place of the mark will write."""
        shape = (*q_TNH.shape[:2], self._value_size or q_TNH.shape[2])
        out_TNH = torch.empty(shape, dtype=q_TNH.dtype, device=q_TNH.device)
        torch.ops.callboard.attend(q_TNH, out_TNH, layer)
        return out_TNH


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A child of the stitched module.  operation: the split operation it consists of; None for a piece."""

    name: str
    module: GraphModule
    operation: str | None


def split(trace: GraphModule, operations: Collection[str]) -> tuple[GraphModule, list[GraphPart]]:
    """Return the stitched module, which calls the parts in order, and the parts."""
    numbers: dict[Node, int] = {}
    split_at: dict[int, str] = {}
    number = 0
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        producer = node.args[0] if node.op == "call_function" and node.target.__name__ == "getitem" else None
        if isinstance(producer, Node) and numbers.get(producer) in split_at:
            numbers[node] = numbers[producer]  # one of several results stays in the part of its operation
            continue
        name = operation_name(node)
        if name in operations:
            numbers[node] = number + 1
            split_at[number + 1] = name
            number += 2
        else:
            numbers[node] = number
    # In the order of the trace, so that in-place writes do not move past reads.
    stitched = split_module(trace, trace, lambda node: numbers[node], keep_original_order=True)
    parts = [
        GraphPart(name, module, split_at.get(int(name.rpartition("_")[2])))
        for name, module in stitched.named_children()
        if isinstance(module, GraphModule)
    ]
    return stitched, parts


def operation_name(node: Node) -> str:
    """Return 'library::operation' of a call of a torch operation, for any overload; '' for anything else."""
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "_qualified_op_name", "")


def fingerprint(piece: GraphModule) -> object:
    """Return a value that is equal for pieces with equal operations and input shapes, such as the middle layers."""
    numbers = {node: number for number, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return id(piece)  # it holds a module or tensor of its own
        described: object = None
        if node.op == "placeholder":
            described = _describe(node.meta["example_value"])
        called = None if node.op == "placeholder" else node.target
        arguments = map_arg((node.args, node.kwargs), lambda one: f"%{numbers[one]}")
        lines.append((node.op, called, repr(arguments), described))
    return tuple(lines)


def _describe(example: object) -> object:
    if isinstance(example, Tensor):
        return str(example.shape), str(example.stride()), example.dtype, example.device, example.layout
    return str(example)
