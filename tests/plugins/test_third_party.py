"""Attention backends of other distributions: tried before they serve, and named when they fail."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from callboard import LLM, SamplingParams
from engine.execution import third_party as foreign
from engine.execution.attention import RankAttention
from engine.execution.split_attention import SplitAttention
from engine.execution.third_party import NamedAttention
from engine.host import timeouts as patience
from engine.kernels.attention import CompiledAttention
from engine.layers.attention import AttentionBackend, AttentionSpec, GraphAttentionBuilder, is_capturable
from engine.layers.kv_pool import KVPool
from engine.plugins import manager, selection
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.manager import Plugins
from engine.settings.attention_names import AttentionNames
from engine.types.errors import EngineDied, PluginError
from tests.benchmarks.planned_attention import PlannedTorchAttention
from tests.graphs.resident import ResidentTorchAttention
from tests.plugins.conftest import Install

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
SOURCE = """
import sys, threading, time
from dataclasses import replace
from engine.types.errors import PluginError
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}
num_calls = 0
let_go = threading.Event()

class Backend(TorchAttention):
    def attend(self, layer, q_TNH):
        global num_calls
        num_calls += 1
        out_TNH = super().attend(layer, q_TNH)
        CHANGE
        return out_TNH

def build(spec, pool):
    BUILD
    return Backend(spec, pool)

@hookimpl
def callboard_attention_backend(context):
    return build
"""
Publish = Callable[..., None]


@pytest.fixture
def publish(install: Install) -> Iterator[Publish]:
    """publish(change="...", build="..."): the torch backend with something added, as attention.theirs of acme."""

    def publish(change: str = "pass", build: str = "pass", name: str = "theirs") -> None:
        source = SOURCE.replace("CHANGE", change).replace("BUILD", build)
        install(f"acme-{name}", {f"attention.{name}": f"acme_{name}"}, {f"acme_{name}.py": source})

    return publish


def start(attention: str | AttentionNames = "theirs", spec: AttentionSpec = SPEC) -> AttentionBackend:
    """What a rank does about attention when it starts."""
    rank = RankAttention(Plugins({"attention": attention}), spec, 16, CPU, torch.float32)
    pool = KVPool(spec.num_layers, 4, 16, spec.num_kv_heads, spec.head_size, torch.float32, CPU)
    return rank.build(pool)


def test_one_that_is_right_serves_behind_its_name(publish: Publish, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    publish()
    backend = start()
    assert isinstance(backend, NamedAttention)
    assert not is_capturable(backend)
    assert not isinstance(backend, GraphAttentionBuilder)
    assert any("attention.theirs (acme-theirs 1.0): right on a trial" in message for message in caplog.messages)


def test_ours_are_not_wrapped() -> None:
    assert isinstance(start("torch"), TorchAttention | CompiledAttention)
    assert isinstance(start("auto"), TorchAttention | CompiledAttention)
    assert isinstance(start(AttentionNames(prefill="torch")), TorchAttention | CompiledAttention)


LAYERS_DIFFER = AttentionSpec(
    3, 4, 1, 32, 1.0, 8, full_layers=(2,), heads=((2, 16), (2, 16), (1, 32)), lenders=(0, 1, 2)
)


def test_one_is_tried_with_every_kind_of_layer(publish: Publish) -> None:
    publish(build="spec = replace(spec, window=0)")  # the widest layers have no window
    with pytest.raises(PluginError, match="gives wrong results or none on a trial"):
        start(spec=LAYERS_DIFFER)


def test_one_without_windows_is_for_no_layer_of_a_model_with_some(install: Install) -> None:
    source = SOURCE.replace('"api": 1', '"api": 1, "window": False').replace("CHANGE", "pass").replace("BUILD", "pass")
    install("acme-theirs", {"attention.theirs": "acme_theirs"}, {"acme_theirs.py": source})
    with pytest.raises(PluginError, match="a sliding window of 8 tokens, it does none"):
        start(spec=LAYERS_DIFFER)


def test_two_are_behind_one(publish: Publish) -> None:
    publish()
    assert isinstance(start(AttentionNames(prefill="torch", decode="theirs")), SplitAttention)


@pytest.mark.parametrize(("theirs", "resident"), [(ResidentTorchAttention, True), (PlannedTorchAttention, False)])
def test_one_that_can_be_captured_can_be_behind_its_name(theirs: type, resident: bool) -> None:
    pool = KVPool(1, 4, 16, SPEC.num_kv_heads, SPEC.head_size, torch.float32, CPU)
    backend = NamedAttention("theirs", theirs(SPEC, pool))
    assert is_capturable(backend) == resident
    assert isinstance(backend, GraphAttentionBuilder) != resident


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("out_TNH *= 1.01", "mixed steps: step 0: layer 0, .* is off by"),
        ("out_TNH = out_TNH.half()", "attend returned"),
        ("out_TNH = None", "attend returned NoneType"),
        ("self.pool.keys(layer)[40:41] = 1", "the backend wrote to the KV pool"),
        ("raise RuntimeError('planted')", "raised RuntimeError: planted"),
        ("sys.exit()", "mixed steps: raised SystemExit"),
        ("raise KeyboardInterrupt", "the trial as a whole: raised KeyboardInterrupt"),
        ("layer == 1 and q_TNH.shape[0] > 9 and out_TNH[-1].zero_()", "layer 1"),
    ],
)
def test_one_that_is_wrong_does_not_start(publish: Publish, change: str, said: str) -> None:
    publish(change)
    with pytest.raises(PluginError, match=rf"attention\.theirs \(acme-theirs 1\.0\) .*{said}"):
        start()


def test_one_that_takes_another_page_size_for_granted_does_not_start(publish: Publish) -> None:
    publish(build="import copy; pool = copy.copy(pool); pool.page_size = 32")
    with pytest.raises(PluginError, match=r"attention\.theirs .*(is off by|NaN|raised)"):
        start()


def test_the_window_counts_in_the_trial(publish: Publish) -> None:
    publish(build="spec = replace(spec, window=0)")
    start()
    with pytest.raises(PluginError, match="is off by"):
        start(spec=AttentionSpec(3, 4, 2, 16, 0.25, window=9, first_window_layer=1))


def test_only_what_it_is_to_serve_is_tried(publish: Publish) -> None:
    publish("raise_if = q_TNH.shape[0] > 6 and 1 / 0")  # the trial's decode steps have six rows
    start(AttentionNames(prefill="torch", decode="theirs"))
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        start(AttentionNames(prefill="theirs", decode="torch"))


def test_one_that_hangs_is_named_and_given_up(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish("let_go.wait(); sys.exit()")
    monkeypatch.setattr(foreign, "TRIAL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.01)
    with pytest.raises(PluginError, match=r"attention\.theirs .* was not done after 1 s"):
        start()
    label = "plugin attention.theirs (acme-theirs 1.0): "
    said = [message for message in caplog.messages if message.startswith(label)]
    assert said[0] == f"{label}a trial of a few tokens begins, and may take 1 s"
    assert said[1] == f"{label}its trial has taken 0.01 s so far"
    assert said[2] == f"{label}its trial has taken 0.02 s so far"
    # It is still at it, and was not waited for; a thread that outlives the interpreter would abort the process.
    (trial,) = (thread for thread in threading.enumerate() if thread.name == "trial of attention.theirs")
    sys.modules["acme_theirs"].let_go.set()
    trial.join()


@pytest.mark.parametrize("build", ["raise ValueError('planted')", "raise PluginError('planted')"])
def test_one_that_cannot_be_built_for_the_real_pool_is_named(publish: Publish, build: str) -> None:
    publish(build=f"if spec.num_layers == 3: {build}")
    with pytest.raises(PluginError, match=r"attention\.theirs \(acme-theirs 1\.0\).*planted"):
        start()


def test_where_auto_took_one_that_cannot_be_built_the_next_serves(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish(build="raise PluginError('no kernel image')")
    monkeypatch.setattr(manager, "BUILTIN", {**manager.BUILTIN, "attention.first": "acme_theirs"})
    monkeypatch.setattr(selection, "PREFERRED", {"cpu": ("first", "torch")})
    assert isinstance(start("auto"), TorchAttention | CompiledAttention)
    assert "first: no kernel image" in caplog.messages[-1]
    with pytest.raises(PluginError, match="no kernel image"):
        start("first")


def test_one_that_takes_long_to_be_built_is_named(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(build="spec.num_layers == 3 and time.sleep(1)")
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.1)
    start()
    assert any("attention.theirs (acme-theirs 1.0): building its backend has taken" in one for one in caplog.messages)


@pytest.mark.parametrize("error", [SystemExit(9), KeyboardInterrupt()])
def test_one_that_exits_while_it_serves_does_not_end_the_server_without_a_word(error: BaseException) -> None:
    class Exits:
        def plan_step(self, batch: object) -> None:
            raise error

        def attend(self, layer: int, q_TNH: torch.Tensor) -> torch.Tensor:
            raise error

    backend = NamedAttention("attention.theirs (acme 1.0)", Exits())  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=rf"theirs \(acme 1\.0\) raised in plan_step: {type(error).__name__}"):
        backend.plan_step(None)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=rf"raised in attend, layer 3: {type(error).__name__}"):
        backend.attend(3, torch.ones(1))


def test_one_that_raises_while_it_serves_ends_the_engine_by_name(
    publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    publish("if num_calls > 60: raise RuntimeError('planted')")
    with LLM(progress=False, config={"plugins": {"attention": "theirs"}, "kv": {"num_pages": 64}}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        # Loading it anew does not help: it does not get through its trial any more.
        said = r"plugin attention\.theirs \(acme-theirs 1\.0\) .*RuntimeError: planted"
        with pytest.raises(EngineDied, match=f"executor0 crashed: PluginError: {said}"):
            llm.generate(["one", "two"], greedy)
    assert any(r"raised in attend, layer" in message and "restarted" in message for message in caplog.messages)
    (record,) = [record for record in caplog.records if "raised in attend" in record.getMessage() and record.exc_info]
    assert "planted" in str(record.exc_info[1]), "the author needs the traceback"
