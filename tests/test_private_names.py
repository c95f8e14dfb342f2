"""Every private name of torch and aiohttp that we use is there, with the signature that we call it by.

An upgrade that takes one away fails here, by its name, and not in the middle of a capture or a connection.
"""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_server import Server

ROOT = Path(__file__).parents[1]
# Name -> its parameters; None for what is no function, text for what only its schema or documentation describes.
TORCH: dict[str, list[str] | str | None] = {
    "torch._C._construct_storage_from_data_pointer": "(arg0: typing.SupportsInt | typing.SupportsIndex, arg1: "
    "torch.device, arg2: typing.SupportsInt | typing.SupportsIndex)",
    "torch._C._cuda_endAllocateToPool": None,
    "torch._C._cuda_releasePool": None,
    "torch._dynamo.exc.TorchDynamoException": None,
    "torch._dynamo.lookup_backend": ["compiler_fn"],
    "torch._dynamo.mark_dynamic": ["t", "index"],
    "torch._foreach_copy_": "(Tensor(a!)[] self, Tensor[] src, bool non_blocking=False)",
    "torch._inductor.config.patch": ["arg1", "arg2", "kwargs"],
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": [],
    "torch._make_per_channel_quantized_tensor": None,
    "torch.cpu._is_amx_tile_supported": [],
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None)",
    "torch.ops.aten._scaled_mm": "(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b,",
    "torch.ops.aten._convert_weight_to_int4pack": "(Tensor self, int innerKTiles)",
    "torch.ops.aten._convert_weight_to_int4pack_for_cpu": "(Tensor self, int innerKTiles)",
    "torch.ops.aten._weight_int4pack_mm": "(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros)",
    "torch.ops.aten._weight_int4pack_mm_for_cpu": "(Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros)",
    "torch.distributed._symmetric_memory._SymmetricMemory": None,
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "()",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "()",
    "torch.ops.mkldnn._linear_pointwise": "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm)",
    "torch.ops.mkldnn._reorder_linear_weight": "(Tensor self, int? batch_size=None)",
    "torch.utils._python_dispatch.TorchDispatchMode": None,
    "torch.utils._pytree.tree_flatten": ["tree"],
    "torch.utils._pytree.tree_map_only": ["type_or_types_or_pred", "func", "tree"],
    "torch.utils._pytree.tree_unflatten": ["leaves", "treespec"],
}
AIOHTTP: dict[type, tuple[str, ...]] = {
    RequestHandler: ("_messages", "_request_count", "_request_in_progress", "_loop", "_close"),
    Server: ("_connections", "_kwargs"),
    web.AppRunner: ("_make_server",),
}


def find(name: str) -> Any:
    """The object of a dotted name, by way of modules as far as there are any."""
    parts = name.split(".")
    found = import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:index]))
        found = getattr(found, part)
    return found


def described(function: Any, name: str) -> str:
    """The signature that torch has of a function of which Python knows none."""
    operator = torch.ops.aten._foreach_copy_ if name == "torch._foreach_copy_" else function
    return str(operator.default._schema) if hasattr(operator, "overloads") else operator.__doc__


def used_of_torch() -> set[str]:
    """Dotted names below torch with a private part, in calls and in imports of the engine and the server."""
    used: set[str] = set()
    for path in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "server").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("torch."):
                used.add(name.removesuffix(".default"))
    private = {
        name for name in used if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def test_the_table_has_what_is_used() -> None:
    assert used_of_torch() == set(TORCH)


@pytest.mark.parametrize("name", TORCH)
def test_torch_has_it(name: str) -> None:
    if name.startswith("torch._C._cuda") and not torch.backends.cuda.is_built():
        pytest.skip("torch was built without CUDA")
    found, told = find(name), TORCH[name]
    if isinstance(told, str):
        assert told in described(found, name)
    elif told is not None:
        assert list(inspect.signature(found).parameters)[: len(told)] == told


@pytest.mark.parametrize("kind", AIOHTTP, ids=lambda kind: kind.__name__)
def test_aiohttp_has_them(kind: type) -> None:
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("aiohttp"))
    for name in AIOHTTP[kind]:
        assert hasattr(kind, name) or f"self.{name}" in source, name


def test_aiohttp_takes_and_calls_them_as_we_do() -> None:
    taken = {"keepalive_timeout", "lingering_time", "access_log", "auto_decompress", "loop"}
    assert taken <= set(inspect.signature(RequestHandler.__init__).parameters)
    assert list(inspect.signature(web.AppRunner._make_server).parameters) == ["self"]
    assert {"handler", "request_factory", "handler_cancellation"} <= set(inspect.signature(Server.__init__).parameters)
    page = import_module("server.http.connection").__doc__ or ""
    assert all(name.removeprefix("self.") in page for names in AIOHTTP.values() for name in names)
