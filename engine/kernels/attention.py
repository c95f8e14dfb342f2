"""Attention over pages of float32 on a CPU with a C compiler: the same bits for prompts and decode rows in every step.

Legend: T new tokens in the step (ragged, packed) · B sequences · P pages of a sequence · Q query heads · G KV heads
        H head size · I items, each a part of a sequence's queries
Owns: the description of a step for ``attention.c``, and calling it.  Does not know: the compiler, plugins.
"""

import ctypes
from collections.abc import Collection

import torch
from torch import Tensor

from engine.checkpoints.shape import LAYER_WINDOWS
from engine.kernels.compiled import compiled
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool

# Number of products of a layer below which waking a thread takes longer than it saves.
WORTH_THREADS = 1 << 20


class AttentionStep(ctypes.Structure):
    """The C struct ``Attention`` of ``cpu.h``: a step, for all of its layers."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages_BP", "lengths_B", "query_starts_B1", "items_I2", "scratch")),
        *((name, ctypes.c_int64) for name in ("B", "P", "I", "Q", "G", "H", "page_size", "page_stride", "num_pages")),
        *((name, ctypes.c_int64) for name in ("threads", "together", "worth")),
        ("scale", ctypes.c_float),
    )


class CompiledAttention:
    """An ``AttentionBackend`` in C.  A token's bits depend only on the tokens of its sequence (``attention.c``).

    windows: of each layer.  widest: window of the layer that sees most.  step: the planned step."""

    def __init__(self, library: ctypes.CDLL, spec: AttentionSpec, pool: KVPool) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._attend, self._plan = library.attend, library.attention_plan
        self._attend.argtypes, self._attend.restype = [pointer] * 5 + [size], None
        self._plan.argtypes, self._plan.restype = [pointer, *[size] * 2, pointer, size], size
        library.attention_scratch.argtypes, library.attention_scratch.restype = [size], size
        self._scratch_floats = library.attention_scratch(spec.head_size)
        self._library, self._spec, self._pool = library, spec, pool
        self.windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        self.widest = 0 if 0 in self.windows else max(self.windows)
        self._threads, self._room = 0, 0
        self._scratch, self._items = torch.empty(0), torch.empty(0, dtype=torch.int32)
        self._read: tuple[Tensor, ...] = ()
        self.step = AttentionStep(
            Q=spec.num_heads,
            G=spec.num_kv_heads,
            H=spec.head_size,
            page_size=pool.page_size,
            page_stride=pool.page_stride,
            num_pages=pool.num_pages + 1,
            worth=WORTH_THREADS,
            scale=spec.scale,
        )

    def another(self) -> "CompiledAttention":
        """Return a backend with the same model and pool, for steps that C itself plans."""
        return CompiledAttention(self._library, self._spec, self._pool)

    def have_scratch(self, threads: int) -> None:
        """Allocate memory for so many threads at once."""
        if threads > self._threads:
            self._threads = threads
            self._scratch = torch.empty(threads * self._scratch_floats)
            self.step.scratch = self._scratch.data_ptr()

    def plan_step(self, batch: AttentionBatch) -> None:
        """Plan a step.  Raises IndexError for a page that the pool does not have."""
        tensors = (batch.page_table_BP.contiguous(), batch.lengths_B.contiguous(), batch.query_starts_B1.contiguous())
        assert all(one.dtype == torch.int32 for one in tensors), "pages and lengths must be int32"
        step, threads = self.step, torch.get_num_threads()
        self.have_scratch(threads)
        self._read = tensors  # keeps the memory that ``step`` points to
        step.pages_BP, step.lengths_B, step.query_starts_B1 = map(Tensor.data_ptr, tensors)
        step.B, step.P = tensors[0].shape
        wrong = self._cut(threads)
        if self._room < step.I:
            self._room = 2 * step.I
            self._items = torch.empty(2 * self._room, dtype=torch.int32)
            wrong = self._cut(threads)
        if wrong >= 0:
            raise IndexError(
                f"row {wrong} is longer than its {step.P} pages, has more queries than tokens, or has a page that is "
                f"not among the pool's {step.num_pages}"
            )

    def _cut(self, threads: int) -> int:
        where = (ctypes.addressof(self.step), self.widest, threads, self._items.data_ptr(), self._room)
        wrong: int = self._plan(*where)
        return wrong

    def attend(self, layer: int, q_TQH: Tensor) -> Tensor:
        """Return out_TQH (``AttentionBackend.attend``)."""
        q_TQH = q_TQH.contiguous()
        assert q_TQH.dtype == torch.float32, f"{q_TQH.dtype} is not float32"
        out_TQH = torch.empty_like(q_TQH)
        tensors = (q_TQH, self._pool.keys(layer), self._pool.values(layer), out_TQH)
        self._attend(ctypes.addressof(self.step), *map(Tensor.data_ptr, tensors), self.windows[layer])
        return out_TQH


def attends_in_c(needs: Collection[str], dtype: torch.dtype) -> bool:
    """Return whether C attends over pages of this type, for a model with these ``AttentionSpec.needs``."""
    return dtype == torch.float32 and not {*needs} - {LAYER_WINDOWS} and compiled() is not None


def compiled_attention(spec: AttentionSpec, pool: KVPool) -> CompiledAttention | None:
    """Return the backend for such a pool; None if its pages keep another type, if the model needs a feature that the
    backend lacks, and if nothing can be compiled."""
    is_plain = pool.data.device.type == "cpu" and pool.format.plain
    library = compiled() if is_plain and attends_in_c(spec.needs, pool.dtype) else None
    return None if library is None else CompiledAttention(library, spec, pool)
