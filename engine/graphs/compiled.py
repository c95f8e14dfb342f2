"""The model as compiled pieces between its split operations, in three phases.

1. The model is traced once, with a symbol for the number of tokens, and the trace is split at attention, at
   collectives and at the operations that plugins name.
2. Pieces that do the same, as all layers but the first and the last do, share one compilation, for any number of
   tokens.
3. Or one for each number of tokens, when a piece first meets it: on a GPU fixed shapes are worth more than the time.

The result is an ordinary function of a step.  Run directly it is a model with fewer, larger operations; recorded by a
SegmentRecorder, its split operations are breaks and everything between them is captured.

Legend: T tokens of the run, padding included · D model dim
Owns: the trace and the compiled pieces.  Does not know: capturing, which sizes there are.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import GraphModule

from engine.errors import GraphError
from engine.graphs.attention import BreakingAttention
from engine.graphs.breakable import SegmentRecorder
from engine.graphs.splitting import ALL_REDUCE, ATTEND, MarkedAttention, Part, fingerprint, split
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.models.decoder import Decoder
from engine.plugins.linear.onednn import padded_product

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRACED_TOKENS = 7  # any number but 0 and 1, which tracing takes for constants
Compiled = Callable[..., Any]
# Tracing and compilers keep state of the whole process, and it may run an engine in each of several threads.
_compiling = threading.RLock()


class CompiledModel:
    """``hidden`` of a model in compiled pieces.  Run it under ``torch.inference_mode``, as the model itself.

    compiler: a torch.compile backend: 'inductor', or 'eager' for the split alone.
    fixed_shapes: compile for each number of tokens; else once for all of them, two or more.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        pool: KVPool,
        attention: BreakingAttention,
        comm: Comm,
        recorder: SegmentRecorder,
        compiler: str,
        fixed_shapes: bool,
        named: Sequence[str] = (),
    ) -> None:
        self.num_compilations = 0
        self._model = model
        self._pool = pool
        self._attention = attention
        self._comm = comm
        self._recorder = recorder
        self._compiler = compiler
        self._fixed_shapes = fixed_shapes
        self._named = tuple(named)
        self._compiled: dict[object, Compiled] = {}
        self._stitched: GraphModule | None = None
        self._arguments: list[Any] = []
        self._counts: list[int] = []
        self._inputs: tuple[int, int, int] = (0, 0, 0)
        self.num_tokens = 0
        keep_compilations()

    def hidden(self, step: StepTensors) -> Tensor:
        """See ``Decoder.hidden``; ``step.attention`` and ``step.pool`` are those given at the start."""
        if self._stitched is None:
            self._trace()
        assert self._stitched is not None
        self.num_tokens = len(step.token_ids_T)
        arguments = self._arguments.copy()
        for place in self._counts:
            arguments[place] = self.num_tokens
        for place, tensor in zip(self._inputs, (step.token_ids_T, step.positions_T, step.slots_T), strict=True):
            arguments[place] = tensor
        (x_TD,) = self._stitched(*arguments)
        return x_TD

    def compiled(self, key: object, piece: GraphModule, arguments: Sequence[Any]) -> Compiled:
        """The piece's function for ``arguments``, real or traced ones, compiled if it has not been."""
        if key not in self._compiled:
            piece = deepcopy(piece)  # a compiler may change what it is given
            if self._compiler != "eager":
                hide_packed_products(piece)
            self.num_compilations += 1
            with (
                _compiling,
                torch._inductor.config.patch(size_asserts=False),
            ):  # packed weights have no strides to assert
                self._compiled[key] = lookup_backend(self._compiler)(piece, list(arguments))
        return self._compiled[key]

    def _trace(self) -> None:
        """Phases 1 and 2.  Raises GraphError if the model cannot be traced as one graph."""
        device = self._pool.data.device
        inputs = tuple(torch.zeros(TRACED_TOKENS, dtype=torch.int64, device=device) for _ in range(3))
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)

        def run(token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> Tensor:
            marked = MarkedAttention()
            return self._model.hidden(StepTensors(token_ids_T, positions_T, slots_T, slots_T, marked, self._pool))

        def take(trace: GraphModule, examples: Sequence[Any]) -> Compiled:
            self._stitched = self._stitch(trace)

            def called_once(*arguments: Any) -> tuple[Tensor]:
                self._remember(arguments, inputs)
                return (inputs[0].new_zeros((TRACED_TOKENS, 1), dtype=self._model.dtype),)

            return called_once

        # Traces are cached by code object, and so is the decision that there have been too many of them.
        own = FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
        try:
            with _compiling:
                torch.compile(own, backend=take, fullgraph=True, dynamic=False)(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._stitched = None
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, GraphError):
                raise cause from None
            raise GraphError(
                f"graphs.mode=compiled: the model cannot be compiled ({_first_line(cause)}); use graphs.mode=breakable "
                "on a GPU, or graphs.mode=off"
            ) from error

    def _stitch(self, trace: GraphModule) -> GraphModule:
        stitched, parts = split(trace, {ATTEND, ALL_REDUCE, *self._named})
        num_broken, num_layers = sum(part.operation == ATTEND for part in parts), len(self._model.layers)
        if num_broken != num_layers:
            raise GraphError(f"the trace has {num_broken} attention calls to split at, the model {num_layers} layers")
        for part in parts:
            setattr(stitched, part.name, self._replacement(part))
        log.info("traced: %d parts, %d to compile", len(parts), sum(part.operation is None for part in parts))
        return stitched

    def _replacement(self, part: Part) -> nn.Module:
        if part.operation is None:
            piece = Piece(self, part.module)
            if not self._fixed_shapes:
                piece.compile_traced()  # now, while the trace still checks what a compiler assumes of its symbols
            return piece
        if part.operation == ATTEND:
            return AttendPart(self._attention, part.module)
        if part.operation == ALL_REDUCE:
            return AllReducePart(self._comm, part.module)
        return NamedPart(self._recorder, part.operation, part.module)

    def _remember(self, arguments: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        """What the trace takes besides a step: weights and the pool, always the same objects."""
        self._arguments = list(arguments)
        self._counts = [place for place, one in enumerate(arguments) if isinstance(one, int)]
        assert all(arguments[place] == TRACED_TOKENS for place in self._counts), "a second symbol in the trace"
        found = [next(place for place, one in enumerate(arguments) if one is tensor) for tensor in inputs]
        self._inputs = (found[0], found[1], found[2])


class Piece(nn.Module):
    """What lies between two split operations."""

    def __init__(self, owner: CompiledModel, module: GraphModule) -> None:
        super().__init__()
        self._compiled_for = owner.compiled
        self._owner = owner
        self._module = module
        self._key = fingerprint(module)
        self._functions: dict[int, Compiled] = {}
        self._traced: Compiled | None = None

    def compile_traced(self) -> None:
        """For any number of tokens, from the shapes of the trace."""
        examples = [node.meta["example_value"] for node in self._module.graph.nodes if node.op == "placeholder"]
        self._traced = self._compiled_for(self._key, self._module, examples)

    def forward(self, *arguments: Any) -> Any:
        if self._traced is not None:
            return self._traced(*arguments)
        num_tokens = self._owner.num_tokens
        function = self._functions.get(num_tokens)
        if function is None:
            function = self._compiled_for((self._key, num_tokens), self._module, arguments)
            self._functions[num_tokens] = function
        return function(*arguments)


class AttendPart(nn.Module):
    """Attention in the place of its mark."""

    def __init__(self, attention: BreakingAttention, module: GraphModule) -> None:
        super().__init__()
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        self._query, self._out = (_place(module, argument) for argument in node.args[:2])
        self._layer = node.args[2]
        self._attend_into = attention.attend_into

    def forward(self, *arguments: Any) -> tuple[()]:
        self._attend_into(self._layer, arguments[self._query], arguments[self._out])
        return ()


class AllReducePart(nn.Module):
    """The sum over ranks in the place of its mark."""

    def __init__(self, comm: Comm, module: GraphModule) -> None:
        super().__init__()
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        self._place = _place(module, node.args[0])
        self._all_reduce = comm.all_reduce

    def forward(self, *arguments: Any) -> tuple[()]:
        self._all_reduce(arguments[self._place])
        return ()


class NamedPart(nn.Module):
    """An operation that a plugin names, as it was traced."""

    def __init__(self, recorder: SegmentRecorder, operation: str, module: GraphModule) -> None:
        super().__init__()
        self._recorder = recorder
        self._operation = operation
        self._module = module

    def forward(self, *arguments: Any) -> Any:
        return self._recorder.call(self._operation, self._module, arguments, {})


def keep_compilations() -> None:
    """Have the compiler keep its results where the next start finds them, not where a reboot clears them away.

    An environment that says where, in TORCHINDUCTOR_CACHE_DIR, has its way.
    """
    # Importing the compiler sets the variable to its default.
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[CACHE_VARIABLE] = str(home / "callboard" / "inductor")


def _place(module: GraphModule, wanted: Any) -> int:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return placeholders.index(wanted)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


# Products with weights in oneDNN's layout, as one operation that a compiler leaves alone.  Inductor knows the product,
# but only with weights that are constants of the graph, and those would have to be compiled anew for every layer.
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
