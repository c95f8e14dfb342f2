"""The conformance kit for linear kernels: one call checks a kernel, and lists every case that fails.

    from engine.plugins.testing.linear import check_linear
    check_linear(callboard_linear, Declaration(api=1, devices=("cpu",), quantizations=("int8",)))

Legend: T rows of the input · I input features · O output features
Owns: weights and inputs of random and of extreme numbers, the comparison with float64.
Does not know: kernels, layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.host.memory import release_freed
from engine.layers.packing import LinearKernel, PackedWeight
from engine.plugins.declaration import Declaration
from engine.plugins.hookspecs import LinearContext
from engine.plugins.proof.findings import Findings
from engine.types.errors import PluginError

Hook = Callable[[LinearContext], LinearKernel | None]
DTYPES = ("float32", "bfloat16", "float16")
# Largest relative error, in the L2 norm over a row, of a product in a dtype and of one with rounded weights.
DTYPE_ERRORS = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
ERRORS = {"none": 0.0, "float16": 5e-4, "bfloat16": 5e-3, "int8": 4e-2, "fp8": 6e-2, "int4": 0.15}
OTHER_ERROR = 0.2  # of a quantization that is not listed
BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.625}  # of an element
# outputs, inputs: square, wide and tall ones of convenient sizes, and one of odd sizes.
SHAPES = ((64, 64), (48, 256), (512, 96), (37, 80))
ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 64, 200)
MOST_ROWS = 200
INVARIANT_SHAPES = ((512, 96), (256, 3072))  # long sums are computed in other ways for few rows
# For memory: enough large weights that their memory stands out from what an allocator holds back.
LARGE = (2048, 1024)
NUM_LARGE = 12
NOISE_BYTES = 32 << 20


def check_linear(
    hook: Hook, declares: Declaration, device: str = "cpu", options: Mapping[str, Any] | None = None
) -> None:
    """Check a kernel in everything it declares on ``device``.  Raises ConformanceError with every case that fails.

    hook: the plugin's ``callboard_linear``.  Values are compared with float64 and the unrounded weight."""
    findings = Findings(f"linear kernel on {device}")
    for quantization in declares.quantizations:
        for dtype in declares.dtypes or DTYPES:
            context = LinearContext(
                device,
                dtype,
                quantization,
                checkpoint_dtype=(declares.checkpoint_dtypes or (dtype,))[0],
                invariant=declares.invariant,
                options=dict(options or {}),
            )
            _check_context(hook, context, findings)
    findings.conclude()


def _check_context(hook: Hook, context: LinearContext, findings: Findings) -> None:
    what = f"{context.dtype}, {context.quantization}"
    kernel: LinearKernel | None = None
    with findings.case(f"{what}: the hook"):
        try:
            kernel = hook(context)
        except PluginError:
            if not context.invariant:
                raise
            context = replace(context, invariant=False)  # a kernel may refuse that on some machines
            kernel = hook(context)
        assert isinstance(kernel, LinearKernel), f"the hook returned {kernel!r}, which is not a LinearKernel"
        assert kernel.element_bytes > 0, f"element_bytes is {kernel.element_bytes}"
    if kernel is None:
        return
    for outputs, inputs in SHAPES:
        with findings.case(f"{what}: values, {outputs} x {inputs}"):
            _check_values(kernel, context, outputs, inputs)
    with findings.case(f"{what}: no row changes the result of another by its size"):
        _check_outlier(kernel, context)
    with findings.case(f"{what}: the largest sums"):
        _check_saturation(kernel, context)
    with findings.case(f"{what}: rows and weights of zeros"):
        _check_zeros(kernel, context)
    with findings.case(f"{what}: memory"):
        _check_memory(kernel, context)
    if context.invariant:
        with findings.case(f"{what}: the same bits in every batch"):
            _check_invariance(kernel, context)


def _check_values(kernel: LinearKernel, context: LinearContext, outputs: int, inputs: int) -> None:
    weight_OI, x_TI = _random(context, outputs, inputs)
    bias_O = _normal(context, outputs)
    product = _pack(kernel, weight_OI)
    for rows in ROWS:
        for bias in (None, bias_O):
            y_TO = product(x_TI[:rows], bias)
            assert y_TO.dtype == x_TI.dtype, f"{rows} rows: the result is {y_TO.dtype}, the input {x_TI.dtype}"
            _compare(
                f"{rows} rows{'' if bias is None else ' with a bias'}", y_TO, x_TI[:rows], weight_OI, bias, context
            )
    wider = torch.cat((x_TI, x_TI), 1)
    y_TO = product(wider[:8, :inputs], None)
    assert torch.equal(wider[:, :inputs], x_TI), "the product has changed its input"
    _compare("an input with gaps between its rows", y_TO, x_TI[:8], weight_OI, None, context)
    empty = product(x_TI[:0], bias_O)
    assert empty.shape == (0, outputs), f"no rows gave a result of shape {tuple(empty.shape)}"


def _check_outlier(kernel: LinearKernel, context: LinearContext) -> None:
    """Check a batch with one large row: with one scale for the whole batch the other rows would vanish."""
    weight_OI, x_TI = _random(context, 64, 64)
    x_TI[3] *= 1000
    y_TO = _pack(kernel, weight_OI)(x_TI[:16], None)
    _compare("next to a row 1000 times larger", y_TO, x_TI[:16], weight_OI, None, context)


def _check_saturation(kernel: LinearKernel, context: LinearContext) -> None:
    """Check products of one sign that are as large as possible: 16-bit integers would saturate."""
    weight_OI, x_TI = (torch.full_like(one, 3.0) for one in _random(context, 32, 256))
    weight_OI[::2] *= -1
    y_TO = _pack(kernel, weight_OI)(x_TI[:8], None)
    _compare("all elements at the largest", y_TO, x_TI[:8], weight_OI, None, context)


def _check_zeros(kernel: LinearKernel, context: LinearContext) -> None:
    weight_OI, x_TI = _random(context, 32, 64)
    weight_OI[5] = 0
    x_TI[2] = 0
    y_TO = _pack(kernel, weight_OI)(x_TI[:8], None)
    assert y_TO.isfinite().all(), "the result has a NaN or infinity"
    largest = max(y_TO[2].abs().max().item(), y_TO[:, 5].abs().max().item())
    assert largest < 1e-3, f"a row or a weight of zeros gave {largest:.2g}"


def _check_memory(kernel: LinearKernel, context: LinearContext) -> None:
    outputs, inputs = LARGE
    weight_OI, x_TI = _random(context, outputs, inputs)
    packed = kernel.pack(weight_OI)
    if packed is None:
        assert context.quantization == "none", "a weight that must be rounded is left unchanged"
        return
    # The scratch memory of a first product, of which an allocator keeps parts, is not a weight's.
    packed(x_TI[:1], None)
    before = _memory(context)
    kept = [kernel.pack(weight_OI) for _ in range(NUM_LARGE)]
    for one in kept:
        assert one is not None, "one of two equal weights is left unchanged"
        one(x_TI[:1], None)
    taken = _memory(context) - before
    expected = BYTES.get(context.quantization, weight_OI.element_size()) * outputs * inputs
    assert packed.nbytes >= 0.1 * expected, f"nbytes is {packed.nbytes}, an element would have less than a bit"
    assert taken <= 1.2 * packed.nbytes * NUM_LARGE + NOISE_BYTES, (
        f"nbytes is {packed.nbytes}, but {NUM_LARGE} such weights took {taken}"
    )
    if context.quantization in BYTES:
        assert packed.nbytes <= 1.2 * expected, f"{packed.nbytes} bytes, expected about {expected:.0f}"


def _check_invariance(kernel: LinearKernel, context: LinearContext) -> None:
    for outputs, inputs in INVARIANT_SHAPES:
        weight_OI, x_TI = _random(context, outputs, inputs)
        product = _pack(kernel, weight_OI)
        together_TO = product(x_TI, None)
        for rows in range(1, MOST_ROWS) if inputs < MOST_ROWS else ROWS:
            for first in (0, MOST_ROWS - rows):
                part = slice(first, first + rows)
                assert torch.equal(product(x_TI[part], None), together_TO[part]), (
                    f"{outputs} x {inputs}: rows {first} to {first + rows} alone differ from those of {MOST_ROWS}"
                )


def _pack(kernel: LinearKernel, weight_OI: Tensor) -> PackedWeight | Callable[[Tensor, Tensor | None], Tensor]:
    """Return the product with a weight whose plain form is overwritten afterwards."""
    given = weight_OI.clone()
    packed = kernel.pack(given)
    if packed is None:
        return lambda x_TI, bias_O: F.linear(x_TI, weight_OI, bias_O)
    given.fill_(torch.nan)
    return packed


def _random(context: LinearContext, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return a weight whose values fit the checkpoint's dtype, and MOST_ROWS rows of input."""
    weight_OI = _normal(context, outputs, inputs)
    return weight_OI.to(getattr(torch, context.checkpoint_dtype)).to(weight_OI.dtype), _normal(
        context, MOST_ROWS, inputs
    )


def _normal(context: LinearContext, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(context.device, getattr(torch, context.dtype))


def _compare(
    case: str, y_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, context: LinearContext
) -> None:
    expected_TO = F.linear(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    assert y_TO.shape == expected_TO.shape, f"{case}: shape {tuple(y_TO.shape)}, expected {tuple(expected_TO.shape)}"
    error_T = (y_TO.double() - expected_TO).norm(dim=1) / expected_TO.norm(dim=1)
    allowed = DTYPE_ERRORS[context.dtype] + ERRORS.get(context.quantization, OTHER_ERROR)
    worst = int(error_T.argmax())
    assert error_T[worst] <= allowed, (
        f"{case}: row {worst} is off by {error_T[worst]:.2g} of its size, the limit is {allowed:.2g}"
    )


def _memory(context: LinearContext) -> int:
    """Return the bytes in use, without those that an allocator holds back, as far as it can release them."""
    if context.device == "cuda":
        return torch.cuda.memory_allocated()
    release_freed()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
