"""The model as compiled pieces between its split operations, in two phases.

1. The model is traced once, with a symbol for the number of tokens, and the trace is split at attention, at
   collectives and at the operations that plugins and the configuration name.
2. Pieces with equal operations, as all layers but the first and the last have, go through the passes and share one
   compilation, for any number of tokens.

The result is an ordinary function of a step.  Run directly it is a model with fewer, larger operations.  When a
SegmentRecorder records it, its split operations are breaks and everything between them is captured.

Legend: T tokens of the run, padding included · D model dim
Owns: the trace and the compiled pieces.  Does not know: capturing, which sizes there are.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from engine.graphs.attention import BreakingAttention
from engine.graphs.breakable import SegmentRecorder
from engine.graphs.comm import BreakingComm
from engine.graphs.norm_rounding import round_behind_norms
from engine.graphs.passes import GraphPass, PassManager, hide_packed_products
from engine.graphs.splitting import ALL_REDUCE, ATTEND, GraphPart, MarkedAttention, fingerprint, split
from engine.host.cache_folder import writable_folder
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.models.model import Model
from engine.types.errors import GraphError

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
OUR_PASSES = (("of packed products", hide_packed_products), ("of norms in float8", round_behind_norms))
TRACED_TOKENS = 7  # any number but 0 and 1, which tracing treats as constants
Compiled = Callable[..., Any]
# Tracing and compilers keep state per process, which may run engines in several threads.
_compiling = threading.RLock()


class CompiledModel:
    """``hidden`` of a model in compiled pieces.  Run it under ``torch.inference_mode``, like the model itself.

    compiler: a torch.compile backend: 'inductor', or 'eager' for the split alone.
    passes: (name, pass), run on each piece before it is compiled.
    """

    def __init__(
        self,
        *,
        model: Model,
        pool: KVPool,
        attention: BreakingAttention,
        comm: Comm,
        recorder: SegmentRecorder,
        compiler: str,
        passes: Sequence[tuple[str, GraphPass]] = (),
        named: Sequence[str] = (),
    ) -> None:
        self.num_compilations = 0
        self._model = model
        self._pool = pool
        self._attention = attention
        self._comm = comm
        self._recorder = recorder
        self._compiler = compiler
        self._passes = PassManager([*(OUR_PASSES if compiler != "eager" else ()), *passes])
        self._named = tuple(named)
        self._compiled: dict[object, Compiled] = {}
        self._stitched: GraphModule | None = None
        self._arguments: list[Any] = []
        self._counts: list[int] = []
        self._inputs: tuple[int, int, int] = (0, 0, 0)
        self.num_tokens = 0
        keep_compilations()

    def hidden(self, step: StepTensors) -> Tensor:
        """Return x_TD for a step whose attention and pool are those given at the start (``Model.hidden``)."""
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

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Pieces and split operations in order; empty before the first step."""
        return () if self._stitched is None else tuple(self._stitched.children())

    def compiled(self, key: object, piece: GraphModule, arguments: Sequence[Any]) -> Compiled:
        """Return the piece's function for real or traced ``arguments``; compile it if needed."""
        if key not in self._compiled:
            piece = deepcopy(piece)  # passes and compilers change their input
            self._passes.run(piece)
            self.num_compilations += 1
            # Packed weights have no strides to assert.
            with _compiling, torch._inductor.config.patch({"size_asserts": False}):
                self._compiled[key] = lookup_backend(self._compiler)(piece, list(arguments))
        return self._compiled[key]

    def _trace(self) -> None:
        """Trace, split and compile (phases 1 and 2).  Raises GraphError if the trace is not one graph."""
        device = self._pool.data.device
        inputs = tuple(torch.zeros(TRACED_TOKENS, dtype=torch.int64, device=device) for _ in range(3))
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)

        def run(token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> Tensor:
            marked = MarkedAttention(self._model.attention_spec.latent_size)
            return self._model.hidden(StepTensors(token_ids_T, positions_T, slots_T, slots_T, marked, self._pool))

        def take(trace: GraphModule, examples: Sequence[Any]) -> Compiled:
            self._stitched = self._stitch(trace)

            def called_once(*arguments: Any) -> tuple[Tensor]:
                self._remember(arguments, inputs)
                return (inputs[0].new_zeros((TRACED_TOKENS, 1), dtype=self._model.dtype),)

            return called_once

        # A new code object: torch caches traces per code object, and also the decision that there were too many.
        own = FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
        try:
            with _compiling, self._comm.traced() if isinstance(self._comm, BreakingComm) else nullcontext():
                torch.compile(own, backend=take, fullgraph=True, dynamic=False)(*inputs)
        except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as error:
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
        num_broken, num_layers = sum(part.operation == ATTEND for part in parts), self._model.attention_spec.num_layers
        if num_broken != num_layers:
            raise GraphError(f"the trace has {num_broken} attention calls to split at, the model {num_layers} layers")
        for part in parts:
            setattr(stitched, part.name, self._replacement(part))
        absent = set(self._named) - {part.operation for part in parts}
        if absent:
            log.warning("graphs: the model never calls %s, so it is not split there", " or ".join(sorted(absent)))
        log.info("traced: %d parts, %d to compile", len(parts), sum(part.operation is None for part in parts))
        return stitched

    def _replacement(self, part: GraphPart) -> nn.Module:
        if part.operation is None:
            return Piece(self, part.module)
        if part.operation == ATTEND:
            return AttendPart(self._attention, part.module)
        if part.operation == ALL_REDUCE:
            return AllReducePart(self._comm, part.module)
        return NamedPart(self._recorder, part.operation, part.module)

    def _remember(self, arguments: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        """Keep the other inputs of the trace, weights and pool, which are the same objects in every step."""
        self._arguments = list(arguments)
        self._counts = [place for place, one in enumerate(arguments) if isinstance(one, int)]
        assert all(arguments[place] == TRACED_TOKENS for place in self._counts), "a second symbol in the trace"
        found = [next(place for place, one in enumerate(arguments) if one is tensor) for tensor in inputs]
        self._inputs = (found[0], found[1], found[2])


class Piece(nn.Module):
    """The operations between two split operations, compiled at once, while the trace still checks the compiler's
    assumptions about its symbols."""

    def __init__(self, owner: CompiledModel, module: GraphModule) -> None:
        super().__init__()
        self._owner = owner
        self._module = module
        examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
        self._compiled = owner.compiled(fingerprint(module), module, examples)

    def forward(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)


class AttendPart(nn.Module):
    """Attention in place of its mark."""

    def __init__(self, attention: BreakingAttention, module: GraphModule) -> None:
        super().__init__()
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        self._query, self._out = (_place(module, argument) for argument in node.args[:2])
        self.layer = node.args[2]
        self._attend_into = attention.attend_into

    def forward(self, *arguments: Any) -> tuple[()]:
        self._attend_into(self.layer, arguments[self._query], arguments[self._out])
        return ()


class AllReducePart(nn.Module):
    """The sum over ranks in place of its mark."""

    def __init__(self, comm: Comm, module: GraphModule) -> None:
        super().__init__()
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        self._place = _place(module, node.args[0])
        self._all_reduce = comm.all_reduce

    def forward(self, *arguments: Any) -> tuple[()]:
        self._all_reduce(arguments[self._place])
        return ()


class NamedPart(nn.Module):
    """A traced operation that a plugin or the configuration names."""

    def __init__(self, recorder: SegmentRecorder, operation: str, module: GraphModule) -> None:
        super().__init__()
        self._recorder = recorder
        self._operation = operation
        self._module = module

    def forward(self, *arguments: Any) -> Any:
        return self._recorder.call(self._operation, self._module, arguments, {})


def keep_compilations() -> None:
    """Make the compiler keep its results where the next start finds them, and not in a folder that a reboot clears.

    A TORCHINDUCTOR_CACHE_DIR of the environment takes precedence.
    """
    # Importing the compiler sets the variable to its default.
    folder = writable_folder("inductor")  # the compiler raises OSError where it cannot write
    if folder is not None and os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[CACHE_VARIABLE] = str(folder)


def _place(module: GraphModule, wanted: Any) -> int:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return placeholders.index(wanted)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
