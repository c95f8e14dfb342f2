"""The FlashMLA plugin on a CPU: every table and length that it hands over, to one that computes by them."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.layers.attention import AttentionSpec
from engine.plugins.attention import flash_mla as plugin
from engine.plugins.attention.flash_mla import FlashMLAAttention, callboard_attention_backend
from engine.plugins.declaration import Declaration, convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import Plugins
from engine.plugins.selection import contenders
from engine.plugins.support.paging import batch_on, new_pool
from engine.types.errors import PluginError
from tests.attention import fake_flash_mla
from tests.attention.fake_flash_mla import MODULES, FakeFlashMLA
from tests.attention.graph_rows import GraphRows
from tests.attention.signatures import Name, binds, recorded, signature_in_source, source_of

CPU = torch.device("cpu")
SPEC = AttentionSpec(2, 3, 1, 576, 0.07, latent_size=512)
DECLARED = convert_declaration("flash_mla", plugin.CALLBOARD_PLUGIN)
NAMES = [(module, one) for module in MODULES for one in ("get_mla_metadata", "flash_mla_with_kvcache")]


def context(**changes: object) -> AttentionContext:
    shape: dict[str, Any] = {"page_size": 64, "num_heads": 128, "num_kv_heads": 1, "head_size": 576}
    shape |= {"phases": ("decode",), "needs": ("latents",)}
    return AttentionContext(**{"device": "cuda", "dtype": "bfloat16", **shape, **changes})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with a Hopper GPU, as far as the hook looks, and the library under one of its two names."""
    machine = SimpleNamespace(library=FakeFlashMLA(), capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: machine.capability)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", machine.library)
    return machine


def test_a_graph_divides_the_keys_of_each_step_once(gpu: Any):
    pool = new_pool(SPEC, 8, 64, torch.float32, CPU)
    graph = GraphRows(FlashMLAAttention(gpu.library, SPEC, pool), pool, num_rows=3, max_pages=2)
    assert not graph.plans, "a graph needs nothing of the host"
    q_TNH = torch.randn(3, 3, 576)
    for lengths in ([70, 1], [71, 2], [72, 128]):
        before = gpu.library.divided
        table = np.array([[1, 2], [4, 5]], dtype=np.int32)
        graph.plan_step(batch_on(CPU, 2, table, np.array(lengths, np.int32), np.ones(2, np.int32)))
        for layer in range(SPEC.num_layers):
            assert graph.attend(layer, q_TNH).shape == (3, 3, 512)
        assert gpu.library.divided == before + 1, "once a step, not once a layer"


def test_the_hook_tries_the_kernel_out_by_whichever_library_there_is(gpu: Any):
    pool = new_pool(SPEC, 2, 64, torch.float32, CPU)
    backend = callboard_attention_backend(context())(SPEC, pool)
    assert gpu.library.calls
    assert isinstance(backend, FlashMLAAttention)


def test_prompts_and_models_without_latents_are_not_for_it(gpu: Any):
    pool = new_pool(SPEC, 2, 64, torch.float32, CPU)
    prompt = batch_on(CPU, 0, np.zeros((1, 1), np.int32), np.array([5], np.int32), np.array([5], np.int32))
    with pytest.raises(AssertionError, match="0 of 1 decode"):
        FlashMLAAttention(gpu.library, SPEC, pool).plan_step(prompt)
    assert "head size 128, it takes 576" in DECLARED.misfits(context(head_size=128, needs=()))
    with pytest.raises(PluginError, match="is for models with latent attention"):
        callboard_attention_backend(context(needs=()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 16}, "page size 16, it takes 64"),
        ({"head_size": 320}, "latents of 320 numbers, it takes 512 + 64"),
        ({"dtype": "float32"}, "dtype float32, it takes bfloat16, float16"),
        ({"phases": ("prefill", "decode")}, "it does not serve prefill"),
        ({"kv_dtype": "fp8_e4m3"}, "kv.dtype fp8_e4m3, it takes bfloat16"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused_by_name(changes: dict[str, object], reason: str):
    assert reason in DECLARED.misfits(context(**changes))
    assert not set(DECLARED.misfits(context())) - {"package flash_mla | sgl_kernel is not installed"}


def test_auto_takes_it_for_decode_rows_over_latents_in_pages_of_64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Declaration, "missing_packages", lambda self: [])
    for page_size, first in ((64, "flash_mla"), (16, "flash_attn")):
        found, _ = contenders(Plugins({"attention": "auto"}), context(page_size=page_size))
        assert found[0].name == first


def test_an_older_gpu_no_library_and_a_kernel_that_fails_are_named_before_the_start(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available")

    pool = new_pool(SPEC, 2, 64, torch.float32, CPU)
    monkeypatch.setattr(gpu.library, "flash_mla_with_kvcache", fails)
    with pytest.raises(PluginError, match=r"fails on a trial run \(RuntimeError: no kernel image is available\)"):
        callboard_attention_backend(context())(SPEC, pool)
    gpu.capability = (10, 0)
    with pytest.raises(PluginError, match=r"needs compute capability 9.0, this GPU has 10.0"):
        callboard_attention_backend(context())
    gpu.capability = (9, 0)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", None)
    with pytest.raises(PluginError, match=r"finds no FlashMLA \(flash_mla: .*sgl_kernel.flash_mla: .*sglang-kernel"):
        callboard_attention_backend(context())


# ---- signatures ----------------------------------------------------------------------------------


def every_call() -> FakeFlashMLA:
    library, pool = FakeFlashMLA(), new_pool(SPEC, 2, 64, torch.float32, CPU)
    attention = FlashMLAAttention(library, SPEC, pool)  # type: ignore[arg-type]
    attention.plan_step(batch_on(CPU, 1, np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.ones(1, np.int32)))
    attention.attend(0, torch.zeros(1, 3, 576))
    return library


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_every_call_is_one_that_the_libraries_take(name: Name):
    """As recorded, on any machine, and as in the source of an installed one."""
    calls = [call for call in every_call().made if call[0] == name]
    assert calls
    for call in calls:
        binds(recorded(name), call)
        if source_of(name[0]) is not None:
            binds(signature_in_source(name), call)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("parameter", ["block_table", "head_dim_v", "softmax_scale"])
def test_a_function_that_changes_is_noticed(module: str, parameter: str, monkeypatch: pytest.MonkeyPatch):
    changed = (module, "flash_mla_with_kvcache")
    before = recorded(changed)
    mutant = before.replace(parameters=[one for one in before.parameters.values() if one.name != parameter])
    assert mutant != before
    monkeypatch.setattr(fake_flash_mla, "recorded", lambda name: mutant if name == changed else recorded(name))
    with pytest.raises(TypeError, match="argument"):
        every_call()
