"""Functions that several kernels share.

Owns: products in float32 for operands of any type, also in the interpreter, which by itself multiplies the bits of
bfloat16 numbers as integers; caps and sinks of attention scores.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, sums, INTERPRETED: tl.constexpr):
    """Return sums + a @ b.  float32 operands are not rounded for tensor cores."""
    return multiply_by(a, b, sums, INTERPRETED, "ieee")


# No default for PRECISION: Triton 3.6 does not compile a call that leaves out a string.
@triton.jit
def multiply_by(a, b, sums, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr):
    """Return sums + a @ b.  PRECISION: of float32 operands on tensor cores, as ``tl.dot`` has it."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def squashed(score, squash):
    """Return tanh(score squash / 2), from -1 to 1."""
    return 2.0 * tl.sigmoid(score * squash) - 1.0


@triton.jit
def join_sink(highest, weight, sink_log2):
    """Add a score without a value; return (factor of results so far, new sum of weights).  -inf changes nothing.

    highest, sink_log2: scores times log2(e), scalars or vectors."""
    top = tl.maximum(highest, sink_log2)
    shrink = tl.exp2(highest - top)
    return shrink, weight * shrink + tl.exp2(sink_log2 - top)
