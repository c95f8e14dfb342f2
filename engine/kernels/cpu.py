"""Kernels for a CPU with a C compiler: what stands between the products of a model that one thread runs.

Legend: T tokens · D model dim · A query, key and value heads · Q query heads · G KV heads · S slots of the pool
        H head size · R rotated pairs of a head, H / 2
        B decode rows · P pages of a row · L keys that one may see
Owns: compiling ``cpu.c`` once for this kind of CPU, and calling it.  Does not know: which models run on one thread.

A step of a small model is many operations of torch, of which each costs more than what it computes.  These take three
calls of a few microseconds in a layer in the place of seventeen operations and of torch's attention.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from engine.cache_folder import cache_folder, replace_file
from engine.kernels.choice import VARIABLE
from engine.layers.mlp import gated

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".c")
# Sums may be taken in another order, but NaN and infinity stay what they are: a row that fails must be seen to.
FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
LEVELS = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
COMPILE_S = 60.0


class Decoding(ctypes.Structure):
    """What ``attend_decodes`` is told of a step, for all of its layers; see ``cpu.c``.  Who makes it keeps the tensors
    that it points to: pages_BP and lengths_B, int32 and contiguous, and scores_QL, float32."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages_BP", "lengths_B", "scores_QL")),
        *((name, ctypes.c_int64) for name in ("B", "P", "L", "Q", "G", "H", "page_size", "page_stride", "num_pages")),
        ("scale", ctypes.c_float),
    )


class CPUKernels:
    """See ``LayerKernels``.  All tensors are float32 and contiguous, and their rows are this thread's alone."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm, self._rotate_and_store = library.add_norm, library.rotate_and_store
        self._add_norm.argtypes = [pointer] * 4 + [size] * 2 + [ctypes.c_float]
        self._rotate_and_store.argtypes = [pointer] * 7 + [size] * 5 + [ctypes.c_float]
        self._add_norm.restype, self._rotate_and_store.restype = None, size
        self._attend_decodes = library.attend_decodes
        self._attend_decodes.argtypes, self._attend_decodes.restype = [pointer] * 5 + [size], size

    def add_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See ``LayerKernels.add_norm``."""
        assert all(map(Tensor.is_contiguous, (x_TD, update_TD))), "a row's numbers must stand side by side"
        assert x_TD.dtype == update_TD.dtype == torch.float32, f"{x_TD.dtype} is not float32"
        out_TD = torch.empty_like(x_TD)
        pointers = (x_TD.data_ptr(), update_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr())
        self._add_norm(*pointers, *x_TD.shape, eps)
        return out_TD

    def angle_table(self, positions_T: Tensor, frequencies_R: Tensor, scale: float) -> Tensor:
        """angles_TH: R cosines, then R sines."""
        angles_TR = positions_T[:, None] * frequencies_R
        angles_TH = torch.cat((angles_TR.cos(), angles_TR.sin()), -1)
        return angles_TH if scale == 1.0 else angles_TH.mul_(scale)

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
        """See ``LayerKernels.rotate_and_store``.  limit: 0, as pages keep float32.  Raises IndexError for a slot that
        the pool does not have."""
        num_tokens, num_heads, head_size = qkv_TAH.shape
        num_keys = keys_SGH.shape[1]
        num_queries = num_heads - 2 * num_keys
        assert all(map(Tensor.is_contiguous, (qkv_TAH, keys_SGH))), "heads and slots must stand side by side"
        assert qkv_TAH.dtype == keys_SGH.dtype == torch.float32, f"{qkv_TAH.dtype} and {keys_SGH.dtype}, not float32"
        assert not limit, "pages that keep float32 have no largest number"
        q_TQH = qkv_TAH.new_empty((num_tokens, num_queries, head_size))
        wrong = self._rotate_and_store(
            qkv_TAH.data_ptr(), None if weight_QGH is None else weight_QGH.data_ptr(), angles_TH.data_ptr(),
            slots_T.data_ptr(), q_TQH.data_ptr(), keys_SGH.data_ptr(), values_SGH.data_ptr(),
            num_tokens, num_queries, num_keys, head_size, len(keys_SGH), eps,
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"slot {int(slots_T[wrong])} of token {wrong} is not among the pool's {len(keys_SGH)}")
        return q_TQH

    def attend_decodes(
        self, decoding: "Decoding", q_BQH: Tensor, keys_SGH: Tensor, values_SGH: Tensor, out_BQH: Tensor, window: int
    ) -> None:
        """Attention of one query of each row over its pages; only the first B rows of out_BQH are written.  window: see
        ``AttentionSpec``; 0 for none.  Raises IndexError for a page that the pool does not have."""
        assert all(map(Tensor.is_contiguous, (q_BQH, out_BQH))), "heads must stand side by side"
        pointers = (one.data_ptr() for one in (q_BQH, keys_SGH, values_SGH, out_BQH))
        wrong = self._attend_decodes(ctypes.addressof(decoding), *pointers, window)
        if wrong >= 0:
            raise IndexError(
                f"row {wrong} is longer than its {decoding.P} pages, or has one that is not among the pool's "
                f"{decoding.num_pages}"
            )

    def gated(self, gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
        """See ``LayerKernels.gated``; torch has it in two operations."""
        return gated(gate_up_T2I, kind, None)


@functools.cache
def cpu_kernels() -> CPUKernels | None:
    """The kernels for this CPU, compiled at the first start on it; None, and torch does the work, if that fails.

    None as well where the environment variable CALLBOARD_KERNELS is torch or triton."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if os.environ.get(VARIABLE):
        return None
    if compiler is None:
        log.info("kernels: torch (there is no C compiler; with one a small model's steps are shorter)")
        return None
    try:
        kernels = CPUKernels(_library(compiler))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("kernels: torch (%s cannot compile %s: %s)", compiler, SOURCE.name, error)
        return None
    log.info("kernels: %s, compiled by %s", SOURCE.name, compiler)
    return kernels


def _library(compiler: str) -> ctypes.CDLL:
    """The compiled source, from the user's cache if it is there.  Raises OSError, SubprocessError."""
    command = [*FLAGS, *LEVELS.get(torch.backends.cpu.get_cpu_capability(), ())]
    source = SOURCE.read_bytes()
    key = hashlib.sha256(repr((source, compiler, command, platform.machine(), platform.system())).encode()).hexdigest()
    folder = cache_folder("kernels")
    kept = None if folder is None else folder / f"{key[:32]}.so"
    if kept is not None and kept.exists():
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made_in:
        made = Path(made_in) / "cpu.so"
        subprocess.run(
            [compiler, *command, str(SOURCE), "-o", str(made), "-lm"],
            check=True, capture_output=True, timeout=COMPILE_S,
        )  # fmt: skip
        library = ctypes.CDLL(str(made))  # stays when the file is gone
        try:
            if kept is not None:
                replace_file(kept, made.read_bytes())
        except OSError as error:
            log.info("%s is compiled at each start: %s", SOURCE.name, error)
    return library
