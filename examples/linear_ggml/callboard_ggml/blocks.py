"""Products of float32 inputs with weights in ggml's blocks of four or eight bits: the kernels of llama.cpp.

Legend: T rows of the input · I input features · O output features
model.quantization names the blocks: q4_0, q8_0 or q4_K.  The input is rounded to 8 bits in blocks of its own.
"""

import weakref

import torch
from torch import Tensor

from callboard.plugins import LinearContext, Options, PluginError, decode_options, hookimpl
from callboard_ggml.library import ALIGNMENT, FLOAT32, NODES, TYPES, context, extra_buffer_types, library

CALLBOARD_PLUGIN = {
    "api": 1,
    "devices": ["cpu"],
    "dtypes": ["float32"],
    "quantizations": ["q4_0", "q8_0", "q4_K"],
    "instruction_sets": ["avx2"],
}


class Backend:
    """ggml's CPU backend and the context of the product that runs: one for all weights of a kernel."""

    def __init__(self) -> None:
        ggml = library()
        self.handle = ggml.ggml_backend_cpu_init()
        self.device = ggml.ggml_backend_get_device(self.handle)
        self.buffer_types = [*extra_buffer_types(self.device), ggml.ggml_backend_cpu_buffer_type()]
        self._graph = context(2, NODES)
        weakref.finalize(self, ggml.ggml_backend_free, self.handle)
        weakref.finalize(self, ggml.ggml_free, self._graph)

    def multiply(self, weight: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """Write x W^T into y.  Both are read and written where they are."""
        ggml, buffers = library(), []
        ggml.ggml_reset(self._graph)
        x = ggml.ggml_new_tensor_2d(self._graph, FLOAT32, x_TI.shape[1], x_TI.shape[0])
        y = ggml.ggml_mul_mat(self._graph, weight, x)
        for tensor, memory in ((x, x_TI), (y, y_TO)):
            buffers.append(ggml.ggml_backend_cpu_buffer_from_ptr(memory.data_ptr(), memory.nbytes))
            ggml.ggml_backend_tensor_alloc(buffers[-1], tensor, memory.data_ptr())
        graph = ggml.ggml_new_graph_custom(self._graph, NODES, False)
        ggml.ggml_build_forward_expand(graph, y)
        ggml.ggml_backend_cpu_set_n_threads(self.handle, torch.get_num_threads())
        status = ggml.ggml_backend_graph_compute(self.handle, graph)
        for buffer in buffers:
            ggml.ggml_backend_buffer_free(buffer)
        assert status == 0, f"ggml's product of {tuple(x_TI.shape)} ended with status {status}"


class BlockWeight:
    """W[O, I] in blocks, laid out for this CPU where ggml can."""

    def __init__(self, backend: Backend, kind: int, weight_OI: Tensor) -> None:
        ggml = library()
        self._backend = backend
        self._outputs, inputs = weight_OI.shape
        blocks = torch.empty(self._outputs * ggml.ggml_row_size(kind, inputs), dtype=torch.uint8)
        source = weight_OI.contiguous()
        ggml.ggml_quantize_chunk(kind, source.data_ptr(), blocks.data_ptr(), 0, self._outputs, inputs, None)
        for buffer_type in backend.buffer_types:  # ggml's plain one is the last, and takes everything
            if self._place(kind, inputs, buffer_type):
                break
        ggml.ggml_backend_tensor_set(self._weight, blocks.data_ptr(), 0, blocks.nbytes)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias."""
        y_TO = x_TI.new_empty((len(x_TI), self._outputs))
        if len(x_TI):
            x_TI = x_TI.contiguous()
            self._backend.multiply(self._weight, x_TI.clone() if x_TI.data_ptr() % ALIGNMENT else x_TI, y_TO)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def _place(self, kind: int, inputs: int, buffer_type: int) -> bool:
        """Give the weight memory of that type.  False, with nothing left behind, if no product can read it there."""
        ggml = library()
        made = context(3)
        weight = ggml.ggml_new_tensor_2d(made, kind, inputs, self._outputs)
        size = ggml.ggml_backend_buft_get_alloc_size(buffer_type, weight)
        buffer = ggml.ggml_backend_buft_alloc_buffer(buffer_type, size)
        ggml.ggml_backend_tensor_alloc(buffer, weight, ggml.ggml_backend_buffer_get_base(buffer))
        product = ggml.ggml_mul_mat(made, weight, ggml.ggml_new_tensor_2d(made, FLOAT32, inputs, 1))
        if not ggml.ggml_backend_dev_supports_op(self._backend.device, product):
            ggml.ggml_backend_buffer_free(buffer)
            ggml.ggml_free(made)
            return False
        self._weight, self.nbytes = weight, size
        weakref.finalize(self, ggml.ggml_free, made)
        weakref.finalize(self, ggml.ggml_backend_buffer_free, buffer)
        return True


class Blocks:
    """Rounds every weight to blocks, but those whose inputs do not fill them."""

    def __init__(self, quantization: str) -> None:
        ggml = library()
        self._kind = TYPES[quantization]
        self._backend = Backend()
        self._block = ggml.ggml_blck_size(self._kind)
        self.element_bytes = ggml.ggml_row_size(self._kind, self._block) / self._block

    def pack(self, weight_OI: Tensor) -> BlockWeight | None:
        """See ``LinearKernel.pack``."""
        return None if weight_OI.shape[1] % self._block else BlockWeight(self._backend, self._kind, weight_OI)


@hookimpl
def callboard_linear(context: LinearContext) -> Blocks:
    """ggml's products.  Raises PluginError if the wheel is missing, or is one whose library lacks a function."""
    decode_options("linear.ggml", context.options, Options)
    try:
        return Blocks(context.quantization)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise PluginError(f"plugin linear.ggml: {error}") from None
