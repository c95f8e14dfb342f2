"""Triton's interpreter, faster and the same on every processor: a pytest plugin for processes that interpret kernels.

Faster: at each call of a kernel, and of each function in one, the interpreter looks through the whole language for what
it must replace, and it describes the shape of each of its tensors anew.  What it finds is always the same, so here it
looks once, replaces once a kernel, and describes each shape once.

The same: the interpreter's products are numpy's, which are its BLAS's.  A BLAS chooses its kernels by the processor,
and some of them give a row other bits at another place in the tile.  Tests that compare bits would then judge the BLAS.
Here a product adds up in one order, which depends on the number of inputs alone.

Owns: what is replaced in the interpreter.  Does not know: what is interpreted.
"""

import inspect
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def built_ins(package: Any) -> list[tuple[str, Any]]:
    """Name and value of all that a part of the language implements for the compiler."""
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def replace_built_ins(package: Any, builder: Any, scope: Any) -> None:
    """What the interpreter's function of this purpose does: what is replaced already stays so."""
    for name, member in built_ins(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


patch_language = interpreter._patch_lang
WHOLE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # as if a function named both


def patch_once(fn: Any) -> Any:
    """Replace the language for a kernel.  A function in one finds it replaced; its scope has nothing to restore."""
    return patch_language(WHOLE) if tl.core.is_builtin(tl.load) else interpreter._LangPatchScope()


@cache
def described(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The number of elements and the shape of a tensor, both as constants."""
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


@cache
def checked(sizes: tuple[int, ...]) -> tuple[int, Any]:
    """The number of elements and the shape of a block."""
    return tl.core.validate_block_shape(sizes), tl.tuple(sizes)


def new_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """What ``tl.tensor.__init__`` does."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = described(tuple(kind.shape.values) if kind.is_block() else ())


def new_block_type(block: Any, element: Any, shape: Any) -> None:
    """What ``tl.block_type.__init__`` does; a size may be a number or a constant."""
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    assert sizes, "a block has dimensions"
    block.element_ty, (block.numel, block.shape) = element, checked(sizes)
    block.name = f"<{sizes}, {element}>"


@cache
def stored_as(name: str) -> Any:
    """numpy's dtype of an element, by the name of its type in the language."""
    return numpy_dtype(tl.dtype(name))


numpy_dtype = interpreter._get_np_dtype


def numpy_dtype_of(kind: Any) -> Any:
    return numpy_dtype(kind) if isinstance(kind.scalar, tl.pointer_type) else stored_as(kind.scalar.name)


def fixed_dot(builder: Any, a: Any, b: Any, sum_MN: Any, precision: Any, most_imprecise: Any) -> Any:
    """a [..., M, C] b [..., C, N] + sum, in the sum's dtype.

    The loops of numpy's einsum are its own and call no BLAS.  In both factors the inputs of one result stand side by
    side, so that each result is the same loop over C, wherever in the tile it stands.
    """
    dtype = sum_MN.data.dtype
    left = np.ascontiguousarray(numbers(a).astype(dtype))
    right = np.ascontiguousarray(numbers(b).astype(dtype).swapaxes(-1, -2))
    return interpreter.TensorHandle(np.einsum("...mc,...nc->...mn", left, right) + sum_MN.data, sum_MN.dtype.scalar)


def numbers(factor: Any) -> np.ndarray:
    """A factor's data; the interpreter keeps numbers of 8 bits as bytes."""
    if factor.dtype.primitive_bitwidth == 8 and factor.dtype.is_floating():
        return np.asarray(interpreter._convert_float(factor.data, factor.dtype, tl.float16, None)).view(np.float16)
    return np.asarray(factor.data)


def pytest_configure() -> None:
    for part in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        built_ins(part)  # while nothing is replaced yet
    interpreter._patch_builtin = replace_built_ins
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_dtype_of
    interpreter.InterpreterBuilder.create_dot = fixed_dot
    tl.tensor.__init__ = new_tensor
    tl.block_type.__init__ = new_block_type
