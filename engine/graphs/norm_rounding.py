"""A graph pass: residual add, norm and rounding to float8, three operations of a traced piece, become one launch.

Owns: the pattern of such a run, and its exceptions.  Does not know: kernels, products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from engine.graphs.splitting import operation_name
from engine.kernels.float8_ops import ROUND

NORMS = (torch.rms_norm, F.rms_norm)
ARGUMENTS = ("input", "normalized_shape", "weight", "eps")
ADDITION = "add_"


def round_behind_norms(piece: GraphModule) -> None:
    """Fuse such runs (``GraphPass``).  The sum is still written in place, for later readers of the residual stream."""
    for rounding in piece.graph.nodes:
        if operation_name(rounding) != ROUND:
            continue
        norm, group = rounding.args
        if (found := _norm_of_a_sum(norm)) is None:
            continue
        added, weight, eps = found
        # In the place of the sum: between it and the rounding, the residual stream may be read or written.
        with piece.graph.inserting_before(added):
            arguments = (*added.args, weight, eps, group)
            fused = piece.graph.call_function(torch.ops.callboard.add_norm_round.default, arguments)
        fused.meta = dict(rounding.meta)
        rounding.replace_all_uses_with(fused)
        for node in (rounding, norm, added):
            piece.graph.erase_node(node)


def _norm_of_a_sum(norm: Any) -> tuple[Node, Any, Any] | None:
    """Return (sum, weight, epsilon) of a norm over the last dimension that only the rounding reads; None otherwise."""
    if not isinstance(norm, Node) or norm.target not in NORMS or len(norm.users) != 1:
        return None
    arguments = {**dict(zip(ARGUMENTS, norm.args, strict=False)), **norm.kwargs}
    added, shape, weight, eps = (arguments.get(name) for name in ARGUMENTS)
    if not isinstance(added, Node) or added.target != ADDITION or added.next is not norm or len(added.users) != 1:
        return None
    tensors = eps is not None and all(isinstance(one, Node) for one in (*added.args, weight))
    return (added, weight, eps) if tensors and isinstance(shape, (tuple, list)) and len(shape) == 1 else None
