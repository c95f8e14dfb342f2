"""Matrix products of the kernels, in float32 whatever their operands are.

Owns: a way around the interpreter, which multiplies the bits of bfloat16 numbers as if they were integers.
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
