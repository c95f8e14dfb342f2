"""A module of kernels with a mistake in its source, to see that a test finds it.

A mistake may change what is written, but not write outside of its tensors: the interpreter has the memory of the tests.
"""

import importlib.util
from pathlib import Path
from types import ModuleType


def with_mistake(module: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """Return a copy of a module in which ``wrong`` stands for ``right``, which its source has once."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{module.__name__} has {source.count(right)} of {right!r}"
    file = folder / "with_mistake.py"  # the interpreter reads a kernel's source
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("with_mistake", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
