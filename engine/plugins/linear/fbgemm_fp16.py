"""Products of float32 inputs with float16 weights in FBGEMM's layout, which need half the memory reads.

Legend: T rows of the input · I input features · O output features
A bfloat16 has fewer digits than a float16, so the weights of such a checkpoint lose only digits of the tiniest
elements, less than the rounding of a float32 product.  A weight that would lose more is packed by oneDNN instead,
unless float16 was requested.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.packing import PackedWeight, fits_float16
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.linear import onednn
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "checkpoint_dtypes": ["bfloat16", "float16"],
    "quantizations": ["none", "float16"],
    "instruction_sets": ["avx2"],
    "invariant": True,
}
# FBGEMM cuts rows into blocks.  With AVX-512 a row has the same bits in every block; with AVX2 blocks of one and of two
# rows give other bits, and multiples of six rows have no such blocks.
AVX2_BLOCK = 6
TELLING_ROWS = (1, 2, 7, 31, 121)  # numbers of rows with such blocks


# (pack, product): functions to call FBGEMM.
Door = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]


def by_schema() -> Door:
    """Return torch's permanent operators, for any number of threads.

    A call costs 24 us before it multiplies, as its arguments are matched to a schema."""
    quantized = torch.ops.quantized
    return lambda weight_OI: quantized.linear_prepack_fp16(weight_OI, None), quantized.linear_dynamic_fp16


def direct() -> Door:
    """Return functions for one thread, with the same bits, at 1 us a call: one row by 864 x 256 takes 0.7 of the time.

    torch deprecates these functions, and warns once.  Raises AttributeError, RuntimeError or TypeError if it has
    removed them."""

    def product(x_TI: Tensor, packed: Tensor) -> Tensor:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x_TI, packed, None)

    pack = torch.fbgemm_pack_gemm_matrix_fp16
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fbgemm_.*fp16.* is deprecated", UserWarning)
        product(torch.zeros(1, 16), pack(torch.zeros(16, 16)))
    return pack, product


class HalfWeight:
    """W[O, I] as float16; sums are in float32.  row_step: rows are padded to a multiple of this number."""

    def __init__(self, weight_OI: Tensor, door: Door, row_step: int = 1) -> None:
        pack, self._product = door
        self._packed = pack(weight_OI)
        self._row_step = row_step
        self.nbytes = weight_OI.numel() * torch.float16.itemsize

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        num_rows = x_TI.shape[0]  # ``len`` of a tensor takes several times as long
        padding = -num_rows % self._row_step
        x_PI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
        y_TO = self._product(x_PI, self._packed)
        if padding:
            y_TO = y_TO[:num_rows]
        return y_TO if bias_O is None else y_TO.add_(bias_O)


def invariant_rows(door: Door) -> int:
    """Return the number whose multiples of rows give each row the same bits on this machine."""
    drawn = torch.Generator().manual_seed(1)
    weight_OI, x_TI = torch.randn(32, 96, generator=drawn), torch.randn(max(TELLING_ROWS), 96, generator=drawn)
    expected_TO = HalfWeight(weight_OI, door, AVX2_BLOCK)(x_TI, None)
    product = HalfWeight(weight_OI, door)
    same = all(torch.equal(product(x_TI[:rows], None), expected_TO[:rows]) for rows in TELLING_ROWS)
    return 1 if same else AVX2_BLOCK


class Fp16:
    """Packs weights as float16.

    exact: weights that float16 would round are left to oneDNN.  one_thread: whether the model will run on one thread.
    invariant: as in ``LinearContext``."""

    def __init__(self, exact: bool, one_thread: bool = True, invariant: bool = False) -> None:
        self._exact = exact
        self._invariant = invariant
        self._door = by_schema()
        if one_thread:
            with contextlib.suppress(AttributeError, RuntimeError, TypeError):
                self._door = direct()
        self._row_step = invariant_rows(self._door) if invariant else 1
        self.element_bytes = (torch.float32 if exact else torch.float16).itemsize  # at most

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight as float16, or oneDNN's if float16 rounds it too much or cannot represent a value."""
        if not fits_float16(weight_OI, self._exact):
            return onednn.pack(weight_OI, self._invariant)
        return HalfWeight(weight_OI, self._door, self._row_step)


@hookimpl
def callboard_linear(context: LinearContext) -> Fp16:
    """Build the kernel of FBGEMM's products with float16 weights; takes no options."""
    decode_options("linear.fbgemm_fp16", context.options, Options)
    return Fp16(
        exact=context.quantization == "none", one_thread=torch.get_num_threads() == 1, invariant=context.invariant
    )
