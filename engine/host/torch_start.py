"""A faster first import of torch, if it is built for CPUs alone.

Owns: which of torch's modules wait until they are used, which of its libraries are loaded early.  Does not know: torch.
"""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from engine.host.deferred_modules import DeferredModules
from engine.host.device_defaults import torch_may_use_gpus

# Shapes and types of operators for compilers and exports, and on the meta device for what has none in C++: a quarter of
# torch's import.
DEFERRED = ("torch._meta_registrations", "torch.distributed._meta_registrations", "torch.export")
NEEDING = ("torch._dynamo", "torch._export", "torch._inductor", "transformers")
LIBRARIES = ("libtorch_cpu", "libtorch_python")


def start_torch() -> None:
    """Load torch's libraries on a thread, and defer modules that a start does not use.  torch is imported later."""
    spec = None if "torch" in sys.modules or torch_may_use_gpus() else find_spec("torch")
    if spec is None or spec.origin is None:
        return
    DeferredModules(DEFERRED, NEEDING).install()
    if sys.platform == "linux":
        Thread(target=_load, args=(Path(spec.origin).parent / "lib",), name="libraries", daemon=True).start()


def _load(folder: Path) -> None:
    """Have the linker load and relocate the libraries, without the interpreter's lock."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name in LIBRARIES:
        load(str(folder / f"{name}.so").encode(), os.RTLD_NOW | os.RTLD_LOCAL)  # torch's import reports what is missing
