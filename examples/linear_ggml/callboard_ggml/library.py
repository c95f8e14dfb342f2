"""The part of ggml that a product takes, called in the shared library that the xllamacpp wheel brings along.

Owns: signatures, types of numbers, places of buffers.  Does not know: torch, callboard.
Only functions are called and no struct of ggml's is looked into, so that a newer wheel has to keep little.
"""

import ctypes
import logging
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

TYPES = {"q4_0": 2, "q8_0": 8, "q4_K": 12}  # enum ggml_type
FLOAT32 = 0
ALIGNMENT = 64  # of buffers that ggml is given; its own kernels ask for 32
NODES = 4  # of a graph: two leaves and a product


@ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
def _log(level: int, text: bytes, _: object) -> None:
    """What ggml says, which would go to stderr: a line for every weight that it lays out anew."""
    levels = {3: logging.WARNING, 4: logging.ERROR}
    log.log(levels.get(level, logging.DEBUG), "%s", text.decode(errors="replace").strip())


class InitParams(ctypes.Structure):
    """ggml_init_params: memory of a context, and whether tensors get none of it."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


SIGNATURES = {
    "ggml_init": ([InitParams], c_void_p),
    "ggml_reset": ([c_void_p], None),
    "ggml_free": ([c_void_p], None),
    "ggml_tensor_overhead": ([], c_size_t),
    "ggml_graph_overhead_custom": ([c_size_t, c_bool], c_size_t),
    "ggml_blck_size": ([c_int], c_int64),
    "ggml_row_size": ([c_int, c_int64], c_size_t),
    "ggml_new_tensor_2d": ([c_void_p, c_int, c_int64, c_int64], c_void_p),
    "ggml_mul_mat": ([c_void_p, c_void_p, c_void_p], c_void_p),
    "ggml_new_graph_custom": ([c_void_p, c_size_t, c_bool], c_void_p),
    "ggml_build_forward_expand": ([c_void_p, c_void_p], None),
    "ggml_quantize_chunk": ([c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p], c_size_t),
    "ggml_backend_cpu_init": ([], c_void_p),
    "ggml_backend_cpu_set_n_threads": ([c_void_p, c_int], None),
    "ggml_backend_free": ([c_void_p], None),
    "ggml_backend_get_device": ([c_void_p], c_void_p),
    "ggml_backend_dev_backend_reg": ([c_void_p], c_void_p),
    "ggml_backend_reg_get_proc_address": ([c_void_p, c_char_p], c_void_p),
    "ggml_backend_dev_supports_op": ([c_void_p, c_void_p], c_bool),
    "ggml_backend_cpu_buffer_type": ([], c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": ([c_void_p, c_size_t], c_void_p),
    "ggml_backend_buft_alloc_buffer": ([c_void_p, c_size_t], c_void_p),
    "ggml_backend_buft_get_alloc_size": ([c_void_p, c_void_p], c_size_t),
    "ggml_backend_buffer_get_base": ([c_void_p], c_void_p),
    "ggml_backend_buffer_free": ([c_void_p], None),
    "ggml_backend_tensor_alloc": ([c_void_p, c_void_p, c_void_p], c_int),
    "ggml_backend_tensor_set": ([c_void_p, c_void_p, c_size_t, c_size_t], None),
    "ggml_backend_graph_compute": ([c_void_p, c_void_p], c_int),
}


@cache
def library() -> ctypes.CDLL:
    """ggml's functions.  Raises ImportError without the wheel, AttributeError if it lacks one of them."""
    found = find_spec("xllamacpp")  # which is not run
    if found is None or not found.submodule_search_locations:
        raise ImportError("it calls ggml in the wheel xllamacpp, which is not there: pip install xllamacpp")
    (path,) = Path(next(iter(found.submodule_search_locations))).glob("xllamacpp*.so")
    loaded = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    loaded.ggml_log_set(_log, None)
    return loaded


def context(num_tensors: int, num_nodes: int = 0) -> int:
    """A new context with room for so many tensors, which get no memory from it, and for a graph."""
    ggml = library()
    size = num_tensors * ggml.ggml_tensor_overhead()
    size += ggml.ggml_graph_overhead_custom(num_nodes, False) if num_nodes else 0
    made = ggml.ggml_init(InitParams(size, None, True))
    assert made, f"ggml has no context of {size} bytes"
    return int(made)


def extra_buffer_types(device: int) -> list[int]:
    """Where ggml lays weights out anew for the instructions of this CPU, the best first."""
    ggml = library()
    register = ggml.ggml_backend_dev_backend_reg(device)
    address = ggml.ggml_backend_reg_get_proc_address(register, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    listed = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
    types = []
    while listed and listed[len(types)]:
        types.append(int(listed[len(types)]))
    return types
