"""Decode steps on a CPU, each by one call of C: rows in, logits or the next tokens out.

Legend: B decode rows · D model dim · S slots of the pool · N rows of the engine · M tokens, W pages of a row
Owns: which decoders the call computes, the pages, rows and states that it gets.  Does not know: what is computed.

A call of an operation of a small model's layer costs more than its computation, and so does the layout of a step.
"""

import ctypes

import numpy as np
import torch

from engine.execution.batch import Int32, Int64
from engine.execution.captured_steps import Decoded
from engine.execution.compiled_layers import (
    FLOAT,
    POINTER,
    SIZE,
    describe_layers,
    is_described,
    is_plain_norm,
    panels,
    weight_of,
)
from engine.execution.rows import DeviceRows
from engine.kernels.attention import CompiledAttention
from engine.kernels.compiled import compiled
from engine.kernels.panels import Weight
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.linear import VocabLinear
from engine.layers.norm import RMSNorm
from engine.layers.states import RecurrentStates
from engine.messages import Step
from engine.models.decoder import Decoder
from engine.sampling.captured import SamplingVariant
from engine.sampling.sampler import Sampler

NO_MEMORY, WRONG_TOKEN, WRONG_ROW = 1, 2, 3  # results of ``decode``; 0 for success


class DecoderStack(ctypes.Structure):
    """All layers of a decoder, the parts before and after them, and the tables of rows."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "embedding_VD", "norm_D")),
        *((name, Weight) for name in ("table", "head")),
        *((name, POINTER) for name in ("attention", "tokens_NM", "pages_NW")),
        *((name, SIZE) for name in ("num_layers", "V", "D", "I", "S", "N", "M", "W", "widest")),
        *((name, SIZE) for name in ("most_mixed", "most_inner", "most_channels", "most_heads")),
        *((name, FLOAT) for name in ("embedding_scale", "norm_eps", "logit_scale")),
    )


class CompiledDecodes:
    """Decode steps of any number of rows, with torch's number of threads, while no tap reads states."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: CompiledAttention,
        rows: DeviceRows,
        sampler: Sampler,
        states: RecurrentStates | None,
    ) -> None:
        library = compiled()
        assert library is not None, "attention has kernels, and they are not compiled"
        self._decode = library.decode
        self._decode.argtypes, self._decode.restype = [*[POINTER] * 3, SIZE, *[POINTER] * 2, SIZE, POINTER], SIZE
        self._wrong = SIZE()
        self._decoder = decoder
        self._pool = pool
        self._rows = rows
        self._states = states
        self._sampler = sampler
        self._windows, self._widest = attention.windows, attention.widest
        self._attention = attention.another()
        self.describe()
        if any(one.recurrent or one.attention_gate.O for one in self._layers.layers):
            of_parts = library.functions_of("recurrent.c")
            library.give_recurrences(ctypes.byref(ctypes.c_char.in_dll(of_parts, "RECURRENCES")))
        self._logits_BV = torch.empty((1, self._stack.head.O))

    def describe(self) -> None:
        """Read the places of the decoder's weights; called again if it has others."""
        decoder, pool, rows = self._decoder, self._pool, self._rows
        self._layers = layers = describe_layers(decoder, pool, self._windows, self._states)
        table, norm = decoder.embedding, decoder.norm
        plain_VD = getattr(table, "weight", None)
        assert isinstance(norm, RMSNorm)
        (num_rows, row_len), width = rows.tokens_RM.shape, rows.pages_RP.shape[1]
        self._stack = DecoderStack(
            layers=ctypes.addressof(layers.layers),
            embedding_VD=None if plain_VD is None else plain_VD.data_ptr(),
            norm_D=norm.weight.data_ptr(),
            table=Weight() if plain_VD is not None else weight_of(table),
            head=weight_of(decoder.head),
            attention=ctypes.addressof(self._attention.step),
            tokens_NM=rows.tokens_RM.data_ptr(),
            pages_NW=rows.pages_RP.data_ptr(),
            num_layers=len(layers.layers),
            V=table.rows,
            D=norm.weight.shape[0],
            I=layers.features,
            S=len(pool.keys(0)),
            N=num_rows,
            M=row_len,
            W=width,
            widest=self._widest,
            most_mixed=layers.mixed,
            most_inner=layers.inner,
            most_channels=layers.channels,
            most_heads=layers.heads,
            embedding_scale=decoder.embedding_scale,
            norm_eps=norm.eps,
            logit_scale=decoder.shape.logit_scale,
        )

    verifies = False

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a call for so many rows."""
        return num_rows > 0 and self._decoder.tap is None

    def variant_of(self, rows_N: Int64, positions_N: Int64) -> SamplingVariant:
        """Return how a step of these rows will be sampled."""
        return SamplingVariant.GREEDY if self._sampler.takes_likeliest(rows_N, positions_N) else SamplingVariant.LOGITS

    def apply(self, step: Step) -> None:
        """Take in the changes since the last step."""
        self._rows.apply(step)

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        """Run the step; it is done when this returns.

        Raises MemoryError, and IndexError for a row that cannot exist."""
        num = len(rows_N)
        if num > len(self._logits_BV):
            self._logits_BV = torch.empty((num, self._logits_BV.shape[1]))
        rows_N, lengths_N = np.ascontiguousarray(rows_N, np.int64), np.ascontiguousarray(lengths_N, np.int32)
        write_at_N = torch.from_numpy(rows_N * self._rows.tokens_RM.shape[1] + lengths_N)
        threads = torch.get_num_threads()
        self._attention.have_scratch(threads)
        token_ids_N = torch.empty(num, dtype=torch.int64) if variant is SamplingVariant.GREEDY else None
        failed = self._decode(
            ctypes.addressof(self._stack),
            rows_N.ctypes.data,
            lengths_N.ctypes.data,
            num,
            self._logits_BV.data_ptr(),
            None if token_ids_N is None else token_ids_N.data_ptr(),
            threads,
            ctypes.addressof(self._wrong),
        )
        if failed:
            raise self._error(failed, rows_N, lengths_N)
        logits_NV = self._logits_BV[:num] if token_ids_N is None else None
        return Decoded(token_ids_N, None, logits_NV, write_at_N)

    def _error(self, failed: int, rows_N: Int64, lengths_N: Int32) -> MemoryError | IndexError:
        if failed == NO_MEMORY:
            return MemoryError(f"no memory for a step of {len(rows_N)} rows")
        row, length, stack = int(rows_N[self._wrong.value]), int(lengths_N[self._wrong.value]), self._stack
        if failed == WRONG_TOKEN:
            token = int(self._rows.tokens_RM[row, length - 1])
            return IndexError(f"token {length - 1} of row {row}, {token}, is not among the model's {stack.V}")
        assert failed == WRONG_ROW, f"decode returned {failed}"
        return IndexError(
            f"row {row} with {length} tokens is not among the {stack.N}, is longer than its {stack.W} pages, or has a "
            f"page that is not among the pool's {self._attention.step.num_pages}"
        )


def compiled_decodes(
    model: object,
    pool: KVPool,
    attention: AttentionBackend,
    rows: DeviceRows,
    sampler: Sampler,
    comm: Comm,
    states: RecurrentStates | None = None,
) -> CompiledDecodes | None:
    """Return decode steps in C, or None if C does not compute what the model does, or is missing."""
    if type(model) is not Decoder or not isinstance(attention, CompiledAttention) or comm.size > 1:
        return None  # a decoder that a plugin has derived from this one may compute something else
    if not _ends_are_described(model) or not all(is_described(layer, model) for layer in model.layers):
        return None
    return CompiledDecodes(model, pool, attention, rows, sampler, states)


def _ends_are_described(model: Decoder) -> bool:
    shape, head = model.shape, model.head
    return (
        model.positions is None
        and is_plain_norm(model.norm)
        and isinstance(head, VocabLinear)
        and panels(head) is not None
        and not shape.logit_cap
    )
