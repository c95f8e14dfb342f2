"""Kernels for a CPU with a C compiler: the operations between the products of a model.

Legend: T tokens · D model dim · A query, key and value heads · Q query heads · G KV heads · S slots of the pool
        H head size · R rotated pairs of a head, H / 2
Owns: calling ``cpu.c`` and ``draw.c``.  Does not know: the compiler, the model.

A step of a small model is many operations of torch, each of which costs more than what it computes.  These kernels
replace seventeen operations of a layer by two calls of a few microseconds.
"""

import ctypes
import logging
from functools import cached_property

import torch
from torch import Tensor

from engine.kernels.compiled import compiled
from engine.kernels.library import KernelLibrary
from engine.kernels.recurrent import CompiledRecurrences
from engine.layers.mlp import activated_by_rows, gated
from engine.layers.recurrences import Recurrences
from engine.types.errors import PluginError

log = logging.getLogger(__name__)


class CPUKernels:
    """The ``LayerKernels`` of a CPU.  All tensors are float32 and contiguous; a row's bits depend on no other row."""

    on_cpu = True

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm, self._rotate_and_store = library.add_norm, library.rotate_and_store
        self._add_norm.argtypes = [pointer] * 4 + [size] * 2 + [ctypes.c_float, size]
        self._rotate_and_store.argtypes = [pointer] * 7 + [size] * 6 + [ctypes.c_float, size]
        self._add_norm.restype, self._rotate_and_store.restype = None, size
        self._turn = library.turn
        self._turn.argtypes, self._turn.restype = [pointer] * 3 + [size] * 2 + [ctypes.c_float, size], None
        self._gate = library.gate
        self._gate.argtypes, self._gate.restype = [pointer] * 2 + [size] * 3, None
        self._draw, self._likeliest = library.draw, library.likeliest
        self._draw.argtypes, self._likeliest.argtypes = [pointer] * 5 + [size] * 4, [pointer] * 2 + [size] * 3
        self._weigh_and_draw = library.weigh_and_draw
        self._weigh_and_draw.argtypes = [pointer] * 7 + [size] * 5
        self._draw.restype = self._likeliest.restype = self._weigh_and_draw.restype = None
        self._weigh, self._log_sums = library.weigh_rows, library.log_sums
        self._weigh.argtypes, self._log_sums.argtypes = [pointer] * 5 + [size] * 4, [pointer] * 3 + [size] * 3
        self._weigh.restype = self._log_sums.restype = None

    @cached_property
    def recurrences(self) -> Recurrences | None:
        """The kernels of recurrent layers and gates, compiled when a layer asks for them; None if that fails."""
        try:
            return CompiledRecurrences(self._library.functions_of("recurrent.c"))
        except PluginError as error:
            log.warning("recurrent layers are computed by torch: %s", error)
            return None

    def add_norm(self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """Add ``update_TD`` in place, if it is given, and return the norm of the sum."""
        given = (x_TD,) if update_TD is None else (x_TD, update_TD)
        assert all(map(Tensor.is_contiguous, given)), "operands must be contiguous"
        assert all(one.dtype == torch.float32 for one in given), f"{x_TD.dtype} is not float32"
        out_TD = torch.empty_like(x_TD)
        update = None if update_TD is None else update_TD.data_ptr()
        pointers = (x_TD.data_ptr(), update, weight_D.data_ptr(), out_TD.data_ptr())
        self._add_norm(*pointers, *x_TD.shape, eps, torch.get_num_threads())
        return out_TD

    def angle_table(self, positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
        """Return angles_TH: R cosines, then R sines."""
        assert positions_T.dtype == torch.int64, f"{positions_T.dtype} is not int64"
        assert all(map(Tensor.is_contiguous, (positions_T, frequencies_R))), "operands must be contiguous"
        num_tokens, pairs = len(positions_T), len(frequencies_R)
        angles_TH = frequencies_R.new_empty((num_tokens, 2 * pairs))
        pointers = (positions_T.data_ptr(), frequencies_R.data_ptr(), angles_TH.data_ptr())
        self._turn(*pointers, num_tokens, pairs, scale, torch.get_num_threads())
        return angles_TH

    def rotate_and_store(
        self,
        qkv_TAH: Tensor,
        weight_QGH: Tensor | None,
        eps: float,
        angles_TH: Tensor,
        keys_SGH: Tensor,
        values_SGH: Tensor,
        slots_T: Tensor,
        limit: float = 0.0,
    ) -> Tensor:
        """Return normed, rotated queries and store keys and values.  limit: 0, since pages keep float32.
        A table that is narrower than a head turns the head's first numbers alone.
        Raises IndexError for a slot that the pool does not have."""
        num_tokens, num_heads, head_size = qkv_TAH.shape
        num_keys = keys_SGH.shape[1]
        num_queries = num_heads - 2 * num_keys
        assert all(map(Tensor.is_contiguous, (qkv_TAH, keys_SGH))), "heads and slots must be contiguous"
        assert qkv_TAH.dtype == keys_SGH.dtype == torch.float32, f"{qkv_TAH.dtype} and {keys_SGH.dtype}, not float32"
        assert not limit, "pages that keep float32 have no largest number"
        q_TQH = qkv_TAH.new_empty((num_tokens, num_queries, head_size))
        wrong = self._rotate_and_store(
            qkv_TAH.data_ptr(), None if weight_QGH is None else weight_QGH.data_ptr(), angles_TH.data_ptr(),
            slots_T.data_ptr(), q_TQH.data_ptr(), keys_SGH.data_ptr(), values_SGH.data_ptr(),
            num_tokens, num_queries, num_keys, head_size, angles_TH.shape[1] // 2, len(keys_SGH), eps,
            torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"slot {int(slots_T[wrong])} of token {wrong} is not among the pool's {len(keys_SGH)}")
        return q_TQH

    def gated(self, gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
        """Return activation(gate) * up.  Kinds but silu are left to torch, which takes two operations."""
        if kind != "silu" or not gate_up_T2I.is_contiguous():
            return gated(gate_up_T2I, kind, None, activated_by_rows)
        num_rows, outputs = gate_up_T2I.shape
        out_TI = gate_up_T2I.new_empty((num_rows, outputs // 2))
        pointers = (gate_up_T2I.data_ptr(), out_TI.data_ptr())
        self._gate(*pointers, num_rows, outputs // 2, torch.get_num_threads())
        return out_TI

    def draw(self, weights_nW: Tensor, num_blocks: int, starts_n: Tensor, positions_n: Tensor) -> Tensor:
        """Return the tokens that ``engine/sampling/draw.py`` draws for these streams and positions, except that a
        number on the border between two tokens may give the other one."""
        assert weights_nW.is_contiguous(), "weights must be contiguous"
        n, width = weights_nW.shape
        sums_nC, token_ids_n = weights_nW.new_empty((n, num_blocks)), torch.empty(n, dtype=torch.int64)
        operands = (weights_nW, sums_nC, starts_n.contiguous(), positions_n.contiguous(), token_ids_n)
        self._draw(*(one.data_ptr() for one in operands), n, width, num_blocks, torch.get_num_threads())
        return token_ids_n

    def weighed_and_drawn(
        self, logits_nV: Tensor, inverse_temperature_n: Tensor, width: int, num_blocks: int, starts_n: Tensor,
        positions_n: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return what ``draw`` returns for the weights of ``weighed``; -1 if the largest logit is not finite or one is
        NaN."""
        logits_nV = logits_nV.contiguous()
        assert logits_nV.dtype == torch.float32, f"{logits_nV.dtype} is not float32"
        n, vocab_size = logits_nV.shape
        weights_nW, sums_nC = logits_nV.new_empty((n, width)), logits_nV.new_empty((n, num_blocks))
        token_ids_n = torch.empty(n, dtype=torch.int64)
        read = (logits_nV, inverse_temperature_n, weights_nW, sums_nC)
        operands = (*read, starts_n.contiguous(), positions_n.contiguous(), token_ids_n)
        sizes = (n, vocab_size, width, num_blocks, torch.get_num_threads())
        self._weigh_and_draw(*(one.data_ptr() for one in operands), *sizes)
        return token_ids_n

    def likeliest(self, logits_nV: Tensor) -> Tensor:
        """Return each row's first likeliest token, int64; -1 if the largest logit is not finite or one is NaN."""
        logits_nV = logits_nV.contiguous()
        assert logits_nV.dtype == torch.float32, f"{logits_nV.dtype} is not float32"
        token_ids_n = torch.empty(len(logits_nV), dtype=torch.int64)
        self._likeliest(logits_nV.data_ptr(), token_ids_n.data_ptr(), *logits_nV.shape, torch.get_num_threads())
        return token_ids_n

    def weighed(
        self, logits_nV: Tensor, inverse_temperature_n: Tensor, width: int, *, with_weights: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return each row's largest logit, NaN if one is NaN; scores_nW and weights_nW as ``engine/sampling/draw.py``
        has them."""
        logits_nV = logits_nV.contiguous()
        assert logits_nV.dtype == torch.float32, f"{logits_nV.dtype} is not float32"
        n, vocab_size = logits_nV.shape
        top_n, scores_nW = logits_nV.new_empty(n), logits_nV.new_empty((n, width))
        weights_nW = torch.empty_like(scores_nW) if with_weights else None
        self._weigh(
            logits_nV.data_ptr(), inverse_temperature_n.data_ptr(), top_n.data_ptr(), scores_nW.data_ptr(),
            None if weights_nW is None else weights_nW.data_ptr(), n, vocab_size, width, torch.get_num_threads(),
        )  # fmt: skip
        return top_n, scores_nW, weights_nW

    def log_sums(self, x_nV: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest number, and the logarithm of the sum of e to each number less that."""
        x_nV = x_nV.contiguous()
        assert x_nV.dtype == torch.float32, f"{x_nV.dtype} is not float32"
        top_n, log_n = x_nV.new_empty(len(x_nV)), x_nV.new_empty(len(x_nV))
        self._log_sums(x_nV.data_ptr(), top_n.data_ptr(), log_n.data_ptr(), *x_nV.shape, torch.get_num_threads())
        return top_n, log_n


def cpu_kernels() -> CPUKernels | None:
    """Return the kernels for this CPU; None, so that torch computes, if nothing can be compiled."""
    library = compiled()
    return None if library is None else CPUKernels(library)
