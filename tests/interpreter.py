"""Triton's interpreter at twice its speed: a pytest plugin for the processes that run kernels without a GPU.

At each call of a kernel, and of each function in one, the interpreter looks through the whole language for what it must
replace.  What it finds is always the same, so this looks once.

Owns: that search.  Does not know: what is interpreted.
"""

import inspect
from functools import cache
from typing import Any

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


def pytest_configure() -> None:
    for part in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        built_ins(part)  # while nothing is replaced yet
    interpreter._patch_builtin = replace_built_ins
