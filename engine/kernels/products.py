"""What several kernels compute alike.

Owns: products in float32 whatever their operands are, with a way around the interpreter, which multiplies the bits of
bfloat16 numbers as if they were integers; caps and sinks of attention's scores.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, sums, INTERPRETED: tl.constexpr):
    """sums + a @ b.  float32 operands are not rounded to what tensor cores take."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def squashed(score, squash):
    """tanh(score squash / 2), from -1 to 1."""
    return 2.0 * tl.sigmoid(score * squash) - 1.0


@triton.jit
def join_sink(highest, weight, sink_log2):
    """(by what a result shrinks, sum of weights) when a score without a value joins; of -inf, nothing changes.

    highest, sink_log2: scores times log2(e).  Scalars or vectors."""
    top = tl.maximum(highest, sink_log2)
    shrink = tl.exp2(highest - top)
    return shrink, weight * shrink + tl.exp2(sink_log2 - top)
