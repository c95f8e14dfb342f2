"""What a GPU and its libraries are for the benchmarks' scripts, on this CPU.

Graphs are recorded and replayed, attention that reads tables on the device and attention that plans on the host are
torch's, FlashInfer and FlashAttention are the stand-ins of ``tests/attention``, compiled pieces are not compiled.  The
pages of every step are held against the pool that it runs on.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.graphs import compiled
from engine.layers.attention import AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.messages import Step
from engine.plugins import selection
from engine.plugins.attention import flash_attn, flash_mla, flashinfer, xqa
from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.attention.xqa import XQAAttention
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import BUILTIN
from engine.plugins.support.paging import windows_of
from engine.startup.race import AttentionRace
from tests.attention.fake_device import FakeStream
from tests.attention.fake_flashinfer import fake_flashinfer
from tests.attention.test_kit_with_fakes import NUM_SMS, fa2, fa3
from tests.attention.test_kit_with_fakes import flash_mla as fake_flash_mla
from tests.benchmarks.planned_attention import PlannedTorchAttention
from tests.graphs.engines import EngineDevice, install
from tests.startup.in_this_process import InThisProcess


class AtOnce(FakeStream):
    """Does what is queued."""

    def queue(self, work: Callable[[], None]) -> None:
        super().queue(work)
        self.run()


def install_doubles(patch: pytest.MonkeyPatch) -> list[EngineDevice]:
    """The devices on which engines that are built from here on capture."""
    patch.setitem(BUILTIN, "attention.triton", "tests.benchmarks.resident_attention")
    patch.setitem(BUILTIN, "attention.flashinfer", "tests.benchmarks.planned_attention")
    patch.setitem(selection.PREFERRED, "cpu", ("triton",))
    # Other processes would not see what is put in place here.
    patch.setattr(
        AttentionRace.__init__, "__kwdefaults__", {**AttentionRace.__init__.__kwdefaults__, "start": InThisProcess}
    )
    patch.setattr(compiled, "CompiledModel", partial(_by_no_compiler, compiled.CompiledModel))
    _check_pages(patch)
    _install_libraries(patch)
    devices = install(patch, resident=False)
    # That nothing is stale is shown by tests/graphs; here it would take most of the time.
    patch.setattr(EngineDevice, "overwrite_dead", lambda device, before: None)
    _count_copies(patch, devices)
    return devices


def _by_no_compiler(kind: Any, **parts: Any) -> Any:
    return kind(**{**parts, "compiler": "eager"})


def _check_pages(patch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner.launch

    def checked(runner: ModelRunner, step: Step) -> LaunchedStep:
        pages = b"".join([*(one.pages for one in step.admissions), step.table_pages])
        largest = np.frombuffer(pages, dtype=np.int32).max(initial=0)
        assert largest < runner.num_pages, f"page {largest} of a pool of {runner.num_pages}"
        return launch(runner, step)

    patch.setattr(ModelRunner, "launch", checked)


def _count_copies(patch: pytest.MonkeyPatch, devices: list[EngineDevice]) -> None:
    """Copies to the recording devices are what a profiler would see of a GPU, between steps that take no time."""
    from gpu_sections import graphs
    from gpu_sections.trace import Span

    def num_copies() -> int:
        return PlannedTorchAttention.num_sent + sum(len(device.copies_in) for device in devices)

    def traced(work: Callable[[], object], device: torch.device) -> list[Span]:
        before = num_copies()
        work()
        copies = [Span(0.0, 0.0, "Memcpy HtoD (Pinned -> Device)")] * (num_copies() - before)
        return [*copies, *(Span(step, step + 0.5, "kernel") for step in range(100))]

    patch.setattr(graphs, "traced", traced)


def _install_libraries(patch: pytest.MonkeyPatch) -> None:
    library = fake_flashinfer(AtOnce())
    package = ModuleType("flashinfer")
    package.__spec__ = ModuleSpec("flashinfer", None)
    vars(package).update(vars(library))
    patch.setitem(sys.modules, "flashinfer", package)

    def flashinfer_hook(context: AttentionContext) -> AttentionFactory:
        return partial(_flashinfer, library, context.options.get("tensor_cores") == "always")

    def flash_attn_hook(context: AttentionContext) -> AttentionFactory:
        return fa3 if context.options.get("implementation", "fa3") == "fa3" else fa2

    def xqa_hook(context: AttentionContext) -> AttentionFactory:
        return partial(XQAAttention, library)

    def flash_mla_hook(context: AttentionContext) -> AttentionFactory:
        return fake_flash_mla

    for plugin, hook in (
        (flashinfer, flashinfer_hook),
        (flash_attn, flash_attn_hook),
        (flash_mla, flash_mla_hook),
        (xqa, xqa_hook),
    ):
        patch.setattr(plugin, "callboard_attention_backend", hook)
        declared = {key: value for key, value in plugin.CALLBOARD_PLUGIN.items() if key not in ("devices", "packages")}
        patch.setattr(plugin, "CALLBOARD_PLUGIN", declared)


def _flashinfer(library: Any, tensor_cores: bool, spec: AttentionSpec, pool: KVPool) -> FlashInferAttention:
    stream, device = AtOnce(), torch.device("cpu")
    setup = Setup(
        library=library,
        spec=spec,
        pool=pool,
        workspace=torch.zeros(64, dtype=torch.uint8),
        plans=StagingRing(BUFFERS * 2 * len(windows_of(spec)), device, stream.event),
        tensor_cores=tensor_cores,
        num_sms=NUM_SMS,
    )
    return FlashInferAttention(setup, StagingRing(BUFFERS * 2, device, stream.event), "auto", ("prefill", "decode"))
