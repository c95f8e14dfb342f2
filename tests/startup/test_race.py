"""Attention measured by a clock that the backends themselves move: what is taken, what is out and why, what is kept."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.execution.attention import RankAttention
from engine.execution.split_attention import SplitAttention
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins import manager, selection
from engine.plugins.comm.local import LocalComm
from engine.plugins.comm.torch import TorchCommOptions
from engine.plugins.manager import Plugins
from engine.plugins.selection import Contender
from engine.plugins.testing.threads import on_ranks
from engine.settings.attention_names import AttentionNames
from engine.settings.sections import PluginsSection
from engine.startup.measurement import RaceEntry
from engine.startup.race import COMPILE_S, AttentionRace, measured_attention, processes_at_once
from engine.startup.race_process import RaceAnswer, RaceProcess, decode, encode
from engine.startup.trial_steps import TrialLoad
from server.cli import main
from tests.graphs.engines import EngineDevice
from tests.own_cache import use_own_cache
from tests.plugins.conftest import Install, install
from tests.startup.in_this_process import InThisProcess

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_layers=3, num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
LOADS = (
    TrialLoad("decode", 2, 40, 1),
    TrialLoad("decode", 1, 70, 1),
    TrialLoad("prefill", 1, 33, 33),
    TrialLoad("prefill", 2, 40, 7),
)
SOURCE = """
import acme_clock
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import hookimpl
from tests.graphs.resident import ResidentTorchAttention

CALLBOARD_PLUGIN = {declared}

def build(spec, pool, options):
    class Backend({base}):
        built_with = options
        def plan_step(self, batch):
            super().plan_step(batch)
            self.decodes = bool(batch.num_decodes)
        def attend(self, layer, q):
            acme_clock.now += options.get("slower", 1) * ({decode} if self.decodes else {prefill})
            out = super().attend(layer, q)
            {change}
            return out
    return Backend(spec, pool)

@hookimpl
def callboard_attention_backend(context):
    return lambda spec, pool: build(spec, pool, dict(context.options))
"""
Enter = Callable[..., None]

__all__ = ["install"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture
def enter(install: Install, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Return enter(name, decode, prefill, ...), which adds a backend that 'auto' looks at, of these seconds a layer."""
    install("acme-clock", {}, {"acme_clock.py": "now = 0.0\n"})
    others = {name: module for name, module in manager.BUILTIN.items() if not name.startswith("attention.")}
    monkeypatch.setattr(manager, "BUILTIN", others)
    monkeypatch.setattr(selection, "PREFERRED", {"cpu": ()})

    def enter(name: str, decode: float, prefill: float, change: str = "pass", **declared: Any) -> None:
        base = declared.pop("base", "TorchAttention")
        source = SOURCE.format(
            declared={"api": 1, **declared}, base=base, decode=decode, prefill=prefill, change=change
        )
        install(f"acme-{name}", {}, {f"acme_{name}.py": source})
        table = {**manager.BUILTIN, f"attention.{name}": f"acme_{name}"}
        monkeypatch.setattr(manager, "BUILTIN", table)
        monkeypatch.setattr(selection, "PREFERRED", {"cpu": (*selection.PREFERRED["cpu"], name)})

    return enter


def start_here(entries: Sequence[RaceEntry], **doubles: Any) -> InThisProcess:
    import acme_clock

    return InThisProcess(entries, clock=lambda: acme_clock.now, **doubles)


def race(
    attention: str | AttentionNames = "auto",
    limit_s: float = 60.0,
    loads: tuple[TrialLoad, ...] = LOADS,
    **options: Any,
) -> AttentionRace:
    plugins = Plugins({"attention": attention}, options=options.pop("tables", None))
    options.setdefault("start", start_here)
    return AttentionRace(
        plugins, options.pop("spec", SPEC), 16, CPU, torch.float32, limit_s=limit_s, loads=loads, **options
    )


def problems(one: AttentionRace) -> dict[str, dict[str, str]]:
    report = one.run()
    return {phase: {str(r.contender): r.problem for r in found} for phase, found in report.results.items()}


def test_each_phase_takes_what_is_fastest_there(enter: Enter) -> None:
    enter("a", decode=3, prefill=1)
    enter("b", decode=2, prefill=4)
    report = race().run()
    assert report.fastest() == {"prefill": Contender("a"), "decode": Contender("b")}
    by_name = {one.name: one.us for one in report.results["decode"]}
    assert by_name == {"a": {"2 x 40": 9e6, "1 x 70": 9e6}, "b": {"2 x 40": 6e6, "1 x 70": 6e6}}  # three layers
    plugins = Plugins({"attention": "auto"})
    rank = RankAttention(plugins, SPEC, 16, CPU, torch.float32, measured=report.fastest())
    pool = KVPool(3, 4, 16, 2, 16, torch.float32, CPU)
    assert isinstance(rank.build(pool), SplitAttention)


def test_what_is_as_fast_does_not_take_the_place_of_what_is_preferred(enter: Enter) -> None:
    enter("preferred", decode=1.02, prefill=2)
    enter("other", decode=1.0, prefill=2)
    assert {one.name for one in race().run().fastest().values()} == {"preferred"}


def test_variants_are_measured_with_their_options_and_one_backend_serves_both_phases(enter: Enter) -> None:
    variants = [
        {"phase": "decode", "options": {"slower": 0.5}},
        {"phase": "prefill", "options": {"kind": "x"}},
    ]
    enter("a", decode=4, prefill=1, variants=variants)
    enter("b", decode=3, prefill=9)
    measured = race().run().fastest()
    assert measured == {"prefill": Contender("a"), "decode": Contender("a", {"slower": 0.5})}
    built = RankAttention(Plugins({"attention": "auto"}), SPEC, 16, CPU, torch.float32, measured=measured)
    assert built.build(KVPool(3, 4, 16, 2, 16, torch.float32, CPU)).built_with == {"slower": 0.5}
    set_by_user = {"attention.a": {"slower": 1}}
    found = race(tables=set_by_user).run().fastest()
    assert found["decode"] == Contender("b")


def test_what_raises_is_wrong_or_cannot_run_is_shown_with_its_reason_and_never_taken(enter: Enter) -> None:
    enter("raises", 1e-6, 1e-6, change="raise RuntimeError('no kernel image')")
    enter("wrong", 1e-6, 1e-6, change="out = out + 1")
    enter("wrong_when_long", 1e-6, 1e-6, change="out = out + (len(q) == 33 or self._whole[-1].num_keys == 70)")
    enter("elsewhere", 1e-6, 1e-6, devices=["cuda"])
    enter("right", 1, 1)
    one = race()
    found = problems(one)
    for phase in ("prefill", "decode"):
        assert "no kernel image" in found[phase]["raises"]
        assert "is off by" in found[phase]["wrong"]
        assert "a result at a context of" in found[phase]["wrong_when_long"]
        assert found[phase]["elsewhere"] == "device cpu, it takes cuda"
    assert one.decide(progress=False) == {"prefill": Contender("right"), "decode": Contender("right")}


class Scripted:
    """A contender that is slow or dies where the script says so.  events: what it was asked to do."""

    def __init__(self, entries: Sequence[RaceEntry], script: str, events: list[str]) -> None:
        self._entries, self._script, self._events = entries, script, events
        self._name = str(entries[0].contender)

    def compiled(self, timeout_s: float) -> Sequence[RaceAnswer]:
        self._events.append(f"{self._name} compiles")
        if self._script == "first fails, second is late":
            return [RaceAnswer({}, "RuntimeError: no kernel image")]
        return [] if self._script == "compiles" else [RaceAnswer({})] * len(self._entries)

    def measured(self, number: int, timeout_s: float) -> RaceAnswer | None:
        self._events.append(f"{self._name} {self._entries[number].phase} is measured")
        return None if self._script == "runs" else RaceAnswer({"1 x 70": 5.0}, took={"measuring": 0.25})

    def end(self) -> None:
        if self._events[-1] != f"{self._name} ends":
            self._events.append(f"{self._name} ends")


@pytest.mark.parametrize("slow", ["compiles", "runs"])
def test_what_is_known_of_others_is_kept_when_one_is_late_which_has_one_more_start(enter: Enter, slow: str) -> None:
    enter("slow", 1, 1)
    enter("right", 1, 1)
    events: list[str] = []

    def start(entries: Sequence[RaceEntry]) -> Scripted:
        return Scripted(entries, slow if entries[0].contender.name == "slow" else "", events)

    for tries in (1, 2):
        events.clear()
        one = race(start=start)
        assert one.decide(progress=False) == {"prefill": Contender("right"), "decode": Contender("right")}
        asked = {event.split()[0] for event in events}
        assert asked == ({"slow", "right"} if tries == 1 else {"slow"}), "what is known is not measured again"
        (late, right) = one.known().results["decode"]
        assert (late.problem.startswith("not "), late.late, late.tries) == (True, tries == 1, tries)
        assert right.us == {"1 x 70": 5.0}
    events.clear()
    assert race(start=start).decide(progress=False)["decode"] == Contender("right")
    assert not events, "it was late twice, so it is out"


def test_what_failed_before_another_phase_was_late_keeps_its_reason(enter: Enter) -> None:
    enter("a", 1, 1)
    enter("b", 1, 1)
    script = {"a": "first fails, second is late", "b": ""}
    report = race(start=lambda entries: Scripted(entries, script[entries[0].contender.name], [])).run()
    first, second = report.results["prefill"][0], report.results["decode"][0]
    assert (first.problem, first.late) == ("RuntimeError: no kernel image", False)
    assert (second.problem, second.late) == (f"not compiled within the {COMPILE_S:g} s for all", True)


@pytest.mark.parametrize("at_once", [1, 2])
def test_one_process_serves_both_phases_and_all_of_a_group_compile_before_the_first_is_measured(
    enter: Enter, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.race.processes_at_once", lambda device, num_bytes: at_once)
    enter("a", 1, 1)
    enter("b", 1, 1)
    events: list[str] = []
    race(start=lambda entries: Scripted(entries, "", events)).run()
    measured = {
        name: [f"{name} prefill is measured", f"{name} decode is measured", f"{name} ends"] for name in ("a", "b")
    }
    together = ["a compiles", "b compiles", *measured["a"], *measured["b"], "a ends", "b ends"]
    assert events == (together if at_once == 2 else ["a compiles", *measured["a"], "b compiles", *measured["b"]])


def test_as_many_compile_at_once_as_there_are_cores_and_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    for free, expected in ((1 << 30, 1), (9 << 30, 4), (78 << 30, 16)):  # 2 GiB each
        monkeypatch.setattr("engine.startup.race.free_bytes", lambda device, free=free: free)
        monkeypatch.setattr("engine.startup.race.available_bytes", lambda: 64 << 30)
        assert processes_at_once(CPU, 1 << 29) == expected
        monkeypatch.setattr("engine.startup.race.available_bytes", lambda: 7 << 30)
        assert processes_at_once(CPU, 1 << 29) == min(expected, 3)


def test_the_log_has_what_each_contender_took(enter: Enter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    enter("a", 1, 1)
    enter("b", 1, 1)
    race(start=lambda entries: Scripted(entries, "", [])).run()
    said = [one for one in caplog.messages if "measuring" in one]
    expected = [(phase, name) for name in ("a", "b") for phase in ("prefill", "decode")]
    assert said == [f"attention race, {phase}: {name}: measuring 0.2 s" for phase, name in expected]


@pytest.mark.parametrize("limits", [{"limit_s": 0.0}, {"compile_s": 0.0}])
def test_a_contender_that_no_time_was_left_for_has_not_been_tried(enter: Enter, limits: dict[str, float]) -> None:
    enter("a", 1, 1)
    enter("b", 1, 1)
    report = race(**limits).run()
    assert {(one.problem, one.tries) for one in report.results["decode"]} == {("no time was left for it", 0)}
    assert report.fastest() == {}
    assert RankAttention(Plugins({"attention": "auto"}), SPEC, 16, CPU, torch.float32, measured=report.fastest())


def test_other_ranks_do_not_give_up_before_a_race_is_over() -> None:
    assert COMPILE_S + PluginsSection().race_s < TorchCommOptions().timeout_s


SLEEPER = """
import os, time
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}

@hookimpl
def callboard_attention_backend(context):
    path = os.path.join(os.path.dirname(__file__), "beats")
    if os.fork() == 0:
        while True:  # what a compiler is: a process of the contender's
            with open(path, "a") as beats:
                beats.write(".")
            time.sleep(0.01)
    time.sleep(600)
    return TorchAttention
"""


def test_a_contender_that_sleeps_past_the_limit_is_killed_with_all_that_it_has_started(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PREFERRED", {"cpu": ()})
    install("acme-sleeper", {"attention.sleeper": "acme_sleeper"}, {"acme_sleeper.py": SLEEPER})
    beats = tmp_path / "beats"

    def start(entries: Sequence[RaceEntry]) -> RaceProcess:
        process = RaceProcess(entries)
        while not beats.exists():
            assert process._process.poll() is None
            time.sleep(0.05)
        return process

    plugins = Plugins({"attention": "sleeper"})
    before = set(threading.enumerate())
    report = AttentionRace(plugins, SPEC, 16, CPU, torch.float32, limit_s=60, compile_s=0.5, start=start).run()
    assert set(threading.enumerate()) <= before, "nothing of a contender is in the engine's process"
    written = beats.stat().st_size
    time.sleep(0.1)
    assert beats.stat().st_size == written, "nothing of it goes on"
    for phase in ("prefill", "decode"):
        (late,) = report.results[phase]
        assert (late.problem, late.late) == ("not compiled within the 0.5 s for all", True)


DIES = """
import os
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.hookspecs import hookimpl

CALLBOARD_PLUGIN = {"api": 1}

class Dies(TorchAttention):
    def __init__(self, spec, pool):
        if spec.num_layers > LAYERS:
            os._exit(3)
        super().__init__(spec, pool)

@hookimpl
def callboard_attention_backend(context):
    return Dies
"""


@pytest.mark.parametrize("layers, when", [(0, "compiled"), (2, "measured")])
def test_contenders_in_processes_of_their_own_are_measured_and_one_that_dies_is_out(
    install: Install, layers: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    install("acme-dies", {"attention.dies": "acme_dies"}, {"acme_dies.py": DIES.replace("LAYERS", str(layers))})
    plugins = Plugins({"attention": "dies"})
    report = AttentionRace(plugins, SPEC, 16, CPU, torch.float32, limit_s=60, loads=LOADS[1:3]).run()
    for phase in ("prefill", "decode"):
        right, out = report.results[phase]
        assert (right.problem, len(right.us)) == ("", 1)
        assert out.problem == f"its process ended with exit code 3 as prefill was {when}"
    (first,) = [one for one in caplog.messages if one.startswith("attention race, prefill: torch: start ")]
    (second,) = [one for one in caplog.messages if one.startswith("attention race, decode: torch: library ")]
    assert all(stage in line for line in (first, second) for stage in ("library", "compiling", "measuring"))


def test_a_model_of_one_layer_is_measured_in_one(enter: Enter) -> None:
    enter("a", 1, 1, change="assert layer == 0, 'there is one layer'")
    found = problems(race(spec=replace(SPEC, num_layers=1)))
    assert found == {"prefill": {"a": ""}, "decode": {"a": ""}}


def test_sinks_types_and_devices_reach_the_process() -> None:
    spec = replace(SPEC, sinks=(torch.tensor([0.5, 1.5]), torch.tensor([2.0, 3.0])))
    entry = RaceEntry(
        Contender("a", {"x": 1}), "decode", {"attention.a": {"y": 2}}, spec, 16, CPU, torch.bfloat16, "layer_first", "",
        LOADS,
    )  # fmt: skip
    (arrived, other) = decode(encode([entry, replace(entry, phase="prefill")]))
    assert (arrived, other.phase) == (entry, "prefill")
    assert [one.tolist() for one in arrived.spec.sinks] == [[0.5, 1.5], [2.0, 3.0]]


def test_a_process_ends_when_the_one_that_started_it_is_gone(install: Install, tmp_path: Path) -> None:
    install("acme-sleeper", {"attention.sleeper": "acme_sleeper"}, {"acme_sleeper.py": SLEEPER})
    entry = RaceEntry(Contender("sleeper"), "decode", {}, SPEC, 16, CPU, torch.float32, "layer_first", "", LOADS[1:2])
    process = RaceProcess([entry])
    while not (tmp_path / "beats").exists():
        assert process._process.poll() is None
        time.sleep(0.05)
    process._to.close()
    assert process._process.wait(30) == -signal.SIGKILL
    process.end()


def test_a_result_is_kept_for_the_same_heads_options_and_contenders(enter: Enter, tmp_path: Any) -> None:
    enter("a", 2, 2)
    enter("b", 1, 1)
    first = race()
    assert first.decide(progress=False)["decode"] == Contender("b")
    import acme_clock

    before = acme_clock.now
    assert race().decide(progress=False)["decode"] == Contender("b")
    assert acme_clock.now == before  # nothing ran
    assert race(tables={"attention.a": {"slower": 2}}).known().results == {"prefill": [], "decode": []}
    (kept,) = (tmp_path / "cache" / "callboard" / "measured").iterdir()
    kept.write_text("{torn")
    assert race().known().results["decode"] == []
    enter("c", 0.5, 0.5)
    assert race().decide(progress=False)["decode"] == Contender("c")


def test_nothing_is_measured_where_there_is_no_choice_or_no_time(enter: Enter) -> None:
    enter("a", 2, 2)
    assert race().decide(progress=True) == {}
    enter("b", 1, 1)
    assert race(limit_s=0).decide(progress=True) == {}
    assert race("a").decide(progress=True) == {}
    assert race(AttentionNames(prefill="a")).decide(progress=True)["decode"] == Contender("b")


@pytest.mark.parametrize("attention, device, lines", [("auto", "cuda", 1), ("torch", "cuda", 0), ("auto", "cpu", 0)])
def test_a_gpu_on_which_flashinfer_cannot_be_compiled_is_a_warning_that_says_what_to_install(
    attention: str, device: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.startup.race.missing_for_flashinfer", lambda: "Install flashinfer-jit-cache")
    plugins = Plugins({"attention": attention})
    AttentionRace(plugins, SPEC, 16, torch.device(device), torch.bfloat16, limit_s=0).decide(progress=False)
    said = "attention: FlashInfer cannot run, and slower kernels take its place. Install flashinfer-jit-cache"
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [said] * lines


def test_decode_is_measured_as_a_graph_has_it(enter: Enter) -> None:
    enter("planned", 1, 1)
    enter("resident", 4, 4, base="ResidentTorchAttention")
    device = EngineDevice(descending=False)
    report = race(start=partial(start_here, graphs=device), loads=LOADS[1:2]).run()
    assert [one.problem for one in report.results["decode"]] == ["", ""]
    timed = {one.name: one.us["1 x 70"] for one in report.results["decode"]}
    # Replays run torch's operations and not the backend's Python, which is what moves this clock.
    assert timed == {"planned": 3e6, "resident": 0.0}


def test_all_ranks_take_what_rank_0_has_measured(enter: Enter) -> None:
    enter("a", decode=3, prefill=1)
    enter("b", decode=2, prefill=4, variants=[{"phase": "prefill", "options": {"slower": 0.1}}])
    ran: list[int] = []
    races = {rank: race() for rank in range(2)}

    class Watched:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def decide(self, progress: bool) -> object:
            ran.append(self.rank)
            return races[self.rank].decide(progress)

    measured = on_ranks(2, lambda comm: measured_attention(Watched(comm.rank), comm, CPU, progress=False))
    expected = {"prefill": Contender("b", {"slower": 0.1}), "decode": Contender("b")}
    assert measured == [expected] * 2
    assert ran == [0]
    assert measured_attention(races[0], LocalComm(), CPU, progress=False) == expected


def test_an_engine_is_built_with_what_was_measured_and_says_so(
    enter: Enter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    enter("a", 2, 2)
    enter("b", 1, 1)
    clocked = {**AttentionRace.__init__.__kwdefaults__, "start": start_here}
    monkeypatch.setattr(AttentionRace.__init__, "__kwdefaults__", clocked)
    config = build_config(Config(), {"model": {"path": "demo"}, "kv": {"num_pages": 64}})
    with LLM(config=config, progress=False) as llm:
        assert llm.generate(["a"], SamplingParams(max_tokens=2, temperature=0))
    assert "plugin: attention.b for prefill and decode (auto: b was measured the fastest)" in caplog.messages


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_results_over_latents_are_compared_too(enter: Enter, kv_dtype: str) -> None:
    declared = {"supports": ["latents"], "kv_dtypes": ["int8"]}
    enter("right", 2, 2, **declared)
    enter("wrong", 1, 1, change="out = out * 1.1", **declared)
    latents = AttentionSpec(num_layers=3, num_heads=4, num_kv_heads=1, head_size=24, scale=0.25, latent_size=16)
    found = problems(race(spec=latents, kv_dtype=kv_dtype))
    assert {phase: names["right"] for phase, names in found.items()} == {"prefill": "", "decode": ""}
    assert all("is off by" in names["wrong"] for names in found.values())


def test_the_command_prints_the_table(
    enter: Enter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        AttentionRace.__init__, "__kwdefaults__", {**AttentionRace.__init__.__kwdefaults__, "start": start_here}
    )
    enter("raises", 1e-6, 1e-6, change="raise RuntimeError('no kernel image')")
    enter("right", 1, 1)
    main(["tune"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "no kernel image" in shown
    assert "fastest" in shown
