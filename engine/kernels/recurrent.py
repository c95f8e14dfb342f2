"""Kernels of recurrent layers for a CPU with a C compiler.

Legend: T new tokens of a step · B rows · C channels of a convolution · K taps, or size of a key · V size of a value
        G heads with a key · H heads with a value · S slots · I numbers of all values
Owns: calling ``recurrent.c``.  Does not know: the compiler, the model.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.layers.states import StatesOfStep

POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class StateRows(ctypes.Structure):
    """The C struct ``Rows`` of ``cpu.h``.  Its maker keeps the arrays that it points to."""

    _fields_ = (
        *((name, POINTER) for name in ("slots_B", "starts_B1", "fresh_B")),
        *((name, SIZE) for name in ("B", "threads")),
    )


class CompiledRecurrences:
    """The ``Recurrences`` of a CPU: a row's tokens one after another, in prompts as in decodes."""

    rowwise = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._convolve, self._delta, self._ssd = library.convolve, library.delta, library.ssd
        self._gate = library.gate_norm
        tensor: list[Any] = [POINTER, SIZE]  # and the distance of its rows or slots
        results: list[Any] = [POINTER, *tensor, POINTER, *[SIZE] * 4]
        self._convolve.argtypes = [POINTER, *tensor, POINTER, POINTER, *tensor, POINTER, *[SIZE] * 3]
        self._delta.argtypes = [POINTER, POINTER, *tensor, *tensor, POINTER, POINTER, FLOAT, *results]
        self._ssd.argtypes = [POINTER, POINTER, *tensor, *[POINTER] * 3, FLOAT, *results]
        self._gate.argtypes = [POINTER, *tensor, *tensor, POINTER, *[SIZE] * 3, FLOAT, *[SIZE] * 3]
        for function in (self._convolve, self._delta, self._ssd, self._gate):
            function.restype = None

    def by_rows(self) -> "CompiledRecurrences":
        """Return these."""
        return self

    def convolve(
        self,
        x_TC: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        windows_SKC: Tensor,
        step: StatesOfStep,
        silu: bool,
    ) -> Tensor:
        """Return y_TC, and keep each row's last inputs."""
        x_TC, bias_C = _rows_of_floats(x_TC), None if bias_C is None else bias_C.float()
        y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
        self._convolve(
            ctypes.byref(_rows(step)), x_TC.data_ptr(), x_TC.stride(0), weight_KC.data_ptr(),
            None if bias_C is None else bias_C.data_ptr(), windows_SKC.data_ptr(), windows_SKC.stride(0),
            y_TC.data_ptr(), x_TC.shape[1], len(weight_KC), silu,
        )  # fmt: skip
        return y_TC

    def delta(
        self,
        qkv_TC: Tensor,
        a_TH: Tensor,
        b_TH: Tensor,
        decay_H: Tensor,
        bias_H: Tensor,
        most: float,
        matrices_SHKV: Tensor,
        step: StatesOfStep,
    ) -> Tensor:
        """Return o_THV of the gated delta rule.  Queries and keys of ``qkv_TC`` get their length in place."""
        sizes = _sizes(qkv_TC, matrices_SHKV)
        a_TH, b_TH = _rows_of_floats(a_TH), _rows_of_floats(b_TH)
        gates_TH2, o_THV = _results(qkv_TC, sizes)
        self._delta(
            ctypes.byref(_rows(step)), qkv_TC.data_ptr(), a_TH.data_ptr(), a_TH.stride(0), b_TH.data_ptr(),
            b_TH.stride(0), decay_H.data_ptr(), bias_H.data_ptr(), most, gates_TH2.data_ptr(),
            matrices_SHKV.data_ptr(), matrices_SHKV.stride(0), o_THV.data_ptr(), *sizes,
        )  # fmt: skip
        return o_THV

    def ssd(
        self,
        xkq_TC: Tensor,
        sizes_TH: Tensor,
        decay_H: Tensor,
        bias_H: Tensor,
        skip_H: Tensor,
        least: float,
        matrices_SHKV: Tensor,
        step: StatesOfStep,
    ) -> Tensor:
        """Return o_THV of Mamba 2."""
        sizes = _sizes(xkq_TC, matrices_SHKV)
        sizes_TH = _rows_of_floats(sizes_TH)
        gates_TH2, o_THV = _results(xkq_TC, sizes)
        self._ssd(
            ctypes.byref(_rows(step)), xkq_TC.data_ptr(), sizes_TH.data_ptr(), sizes_TH.stride(0),
            decay_H.data_ptr(), bias_H.data_ptr(), skip_H.data_ptr(), least, gates_TH2.data_ptr(),
            matrices_SHKV.data_ptr(), matrices_SHKV.stride(0), o_THV.data_ptr(), *sizes,
        )  # fmt: skip
        return o_THV

    def gate(
        self,
        o_TI: Tensor,
        z_TI: Tensor,
        weight: Tensor | None,
        num_groups: int,
        eps: float,
        gated_first: bool,
        kind: str = "silu",
    ) -> Tensor:
        """Return the result behind gate and norm, written over ``o_TI``."""
        _check_floats(o_TI)
        gates_TI = _rows_of_floats(z_TI)
        num_tokens, width = o_TI.shape
        of_group = width // num_groups
        self._gate(
            o_TI.data_ptr(), gates_TI.data_ptr(), gates_TI.stride(0), None if weight is None else weight.data_ptr(),
            of_group if weight is not None and len(weight) == width else 0, o_TI.data_ptr(), num_tokens, width,
            of_group, eps, gated_first and weight is not None, kind == "sigmoid", torch.get_num_threads(),
        )  # fmt: skip
        return o_TI.to(z_TI.dtype)


def _rows(step: StatesOfStep) -> StateRows:
    pointers = (one.data_ptr() for one in (step.slots_B, step.starts_B1, step.fresh_B))
    return StateRows(*pointers, step.num_rows, torch.get_num_threads())


def _rows_of_floats(x_TI: Tensor) -> Tensor:
    """Return the tensor with numbers of a row that lie together."""
    x_TI = x_TI.float()
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


def _check_floats(x_TI: Tensor) -> None:
    assert x_TI.dtype == torch.float32, f"{x_TI.dtype} is not float32"
    assert x_TI.is_contiguous(), "operands must be contiguous"


def _sizes(channels_TC: Tensor, matrices_SHKV: Tensor) -> tuple[int, int, int, int]:
    """Return G, H, K and V."""
    _check_floats(channels_TC)
    _, heads, key, value = matrices_SHKV.shape
    return (channels_TC.shape[1] - heads * value) // (2 * key), heads, key, value


def _results(channels_TC: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Return memory for decays and factors, and for o_THV."""
    num_tokens, (_, heads, _, value) = len(channels_TC), sizes
    return channels_TC.new_empty((num_tokens, heads, 2)), channels_TC.new_empty((num_tokens, heads, value))
