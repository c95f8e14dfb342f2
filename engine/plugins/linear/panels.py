"""Products by callboard's own C, with weights in panels of outputs, as exact as float32, or rounded.

Legend: T rows of the input · I input features · O output features
A product of a small weight takes a few microseconds, where library operators take ten to forty before they multiply.
Each output is one sum in one order, so a row has the same bits in every batch, with any number of threads.
Owns: the choice of panels for a weight.  Does not know: the kernels (``engine/kernels/products.c``).
"""

import torch
from torch import Tensor

from engine.kernels.panels import PanelKind, PanelWeight, Products, products
from engine.layers.packing import fits_float16
from engine.plugins.hookspecs import LinearContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "quantizations": ["none", "float16", "bfloat16", "int8"],
    "instruction_sets": ["avx2", "neon"],
    "invariant": True,
}
LOWER_HALF = 0xFFFF  # of a float32, whose upper half is a bfloat16
ELEMENT_BYTES = {"none": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.07}  # at most, with scales


class Panels:
    """A kernel that lays weights out in panels.  kind: None for halves if lossless, else floats."""

    def __init__(self, functions: Products, kind: PanelKind | None, element_bytes: float) -> None:
        self._functions = functions
        self._kind = kind
        self.element_bytes = element_bytes

    def pack(self, weight_OI: Tensor) -> PanelWeight:
        """Return the weight in panels.  Values beyond float16's range are kept in float32."""
        kind = self._kind
        if kind in (None, PanelKind.HALVES):
            weight_OI = weight_OI.contiguous()
            if _is_bfloat16(weight_OI[:1]) and _is_bfloat16(weight_OI):  # one row shows most of those that are not
                kind = PanelKind.UPPER_HALVES
            else:
                kind = PanelKind.HALVES if fits_float16(weight_OI, exactly=kind is None) else PanelKind.FLOATS
        return PanelWeight(self._functions, weight_OI, kind)

    @property
    def head(self) -> "Panels":
        """The kernel for the LM head, whose rounding matters most: if inputs are rounded, it has twice the bits."""
        finer: dict[PanelKind | None, PanelKind | None] = {
            PanelKind.BYTES: PanelKind.FINE_BYTES,
            PanelKind.PAIRS: None,
            PanelKind.UPPER_HALVES: None,
        }
        return Panels(self._functions, finer[self._kind], self.element_bytes) if self._kind in finer else self


def _is_bfloat16(weight_OI: Tensor) -> bool:
    return not (weight_OI.view(torch.int32) & LOWER_HALF).any()


@hookimpl
def callboard_linear(context: LinearContext) -> Panels:
    """Build the kernel; takes no options.  Raises PluginError if its kernels could not be compiled."""
    decode_options("linear.panels", context.options, Options)
    functions = products()
    if functions is None:
        raise PluginError(
            "linear.panels: its kernels are compiled on this machine, but are not (no C compiler, no AVX2 or NEON, or "
            "CALLBOARD_KERNELS=torch); install one (cc, or CC), or set plugins.linear to another kernel"
        )
    # Without an instruction for it, rounding the input would cost time and gain nothing.
    halves = PanelKind.PAIRS if functions.has_pairs else PanelKind.UPPER_HALVES
    kinds = {"none": None, "float16": PanelKind.HALVES, "bfloat16": halves, "int8": PanelKind.BYTES}
    return Panels(functions, kinds[context.quantization], ELEMENT_BYTES[context.quantization])
