"""The number of threads is the one whose decode steps are fastest, whatever the machine makes of it."""

import logging
from pathlib import Path

import pytest
import torch

from callboard import LLM
from engine.execution import device
from engine.execution.compiled_decodes import CompiledDecodes
from engine.execution.device import set_threads, thread_choices
from engine.execution.step_threads import StepThreads
from engine.host.kept_results import KeptResults
from engine.kernels.panels import products
from engine.plugins.comm.local import LocalComm
from engine.startup import loading
from engine.startup.model_steps import ModelSteps
from engine.startup.thread_race import ThreadRace, common_choices
from engine.types.params import SamplingParams

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


class Machine:
    """Steps take what ``cost`` says: from threads and rows to seconds."""

    def __init__(self, cost):
        self.cost = cost
        self.now = 0.0
        self.threads = 0
        self.steps = []

    def step(self, rows):
        self.steps.append((self.threads, rows))
        self.now += self.cost(self.threads, rows)

    def set_threads(self, threads):
        self.threads = threads

    def race(self, comm=None, kept=None):
        clock = lambda: self.now  # noqa: E731
        return ThreadRace(comm or LocalComm(), self.step, kept=kept, clock=clock, set_threads=self.set_threads)


class Two(LocalComm):
    """One of two ranks, whose other one gathers ``other``."""

    size = 2

    def __init__(self, other):
        self.other = other

    def all_gather(self, tensor, dim=-1):
        return torch.cat([tensor, torch.full_like(tensor, self.other)])


def test_ranks_with_other_choices_measure_nothing(caplog):
    assert common_choices((1, 2), LocalComm()) == (1, 2)
    assert common_choices((1, 2), Two(2)) == (1, 2)
    assert common_choices((), Two(0)) == ()
    with caplog.at_level(logging.INFO):
        assert common_choices((1, 2), Two(0)) == (), "torchrun gives its ranks one thread each"
        assert common_choices((1, 2, 3), Two(4)) == ()
    assert "not measured: ranks have different choices" in caplog.text


def test_many_threads_are_taken_where_they_are_faster(caplog):
    machine = Machine(lambda threads, rows: 0.01 * rows / threads)
    with caplog.at_level(logging.INFO):
        assert machine.race().run((1, 2, 4)) == 4
    assert machine.threads == 4
    assert "threads: 4 (measured, ms of steps of 1 and 8 rows: 4: 2.50, 20.00; 2: 5.00, 40.00" in caplog.text


@pytest.mark.parametrize(("choices", "chosen"), [((1, 2), 1), ((1, 2, 4), 2), ((2,), 2)])
def test_steps_as_short_as_the_event_loops_share_leave_it_a_core(choices, chosen, caplog):
    machine = Machine(lambda threads, rows: 0.0004 * rows / threads)
    with caplog.at_level(logging.INFO):
        assert machine.race().run(choices) == chosen == machine.threads
    assert ("one core is left to the event loop" in caplog.text) == (len(choices) > 1)


def test_one_thread_is_taken_where_others_wait_for_each_other():
    machine = Machine(lambda threads, rows: 0.004 if threads == 1 else 0.2)
    assert machine.race().run((1, 2)) == 1
    assert machine.threads == 1
    assert machine.steps.count((2, 8)) == 2, "what is hopeless is run once, and once before to warm up"


def test_equal_times_are_won_by_fewer_threads():
    assert Machine(lambda threads, rows: 0.01 * (0.97 if threads == 2 else 1)).race().run((1, 2)) == 1


def test_few_threads_are_not_tried_where_half_as_many_are_slow_already():
    machine = Machine(lambda threads, rows: {8: 0.1, 4: 0.25}[threads])
    assert machine.race().run((1, 2, 4, 8)) == 8


def test_a_large_model_is_measured_in_a_single_turn():
    machine = Machine(lambda threads, rows: 0.5 / threads)
    assert machine.race().run((1, 2)) == 2
    assert len(machine.steps) == 8


def test_ranks_go_by_the_slowest():
    class SlowWithTwo(LocalComm):
        """Another rank's steps take a second more with two threads."""

        size = 2

        def all_gather(self, x, dim):
            return x + (1.0 if machine.threads == 2 and machine.steps else 0.0)

    machine = Machine(lambda threads, rows: 0.1 / threads)
    assert machine.race(SlowWithTwo()).run((1, 2)) == 1


def test_threads_are_measured_up_to_the_physical_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    for cpu in range(12):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 6},{cpu % 6 + 6}\n")
    assert thread_choices(tmp_path) == (1, 2, 4, 6)
    assert thread_choices(tmp_path / "nothing known") == (1, 2, 4, 8, 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_choices(tmp_path) == (1, 2, 3)


@pytest.mark.parametrize(
    ("setting", "weight_bytes", "in_force", "left"),
    [(0, 1 << 20, 1, ()), (0, 16 << 20, 1, (1, 2, 4)), (0, 1 << 30, 4, (1, 2, 4)), (3, 1 << 30, 3, ())],
)
def test_a_number_that_is_set_or_follows_from_a_tiny_model_is_not_measured(
    setting, weight_bytes, in_force, left, monkeypatch
):
    threads = []
    monkeypatch.setattr(device, "thread_choices", lambda: (1, 2, 4))
    monkeypatch.setattr(device.torch, "set_num_threads", threads.append)
    assert set_threads(setting, device.torch.device("cpu"), weight_bytes) == left
    assert threads == [in_force]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_an_engine_measures_its_own_steps_and_is_told_of_each(numerics, monkeypatch):
    raced, told = [], []

    class Race(ThreadRace):
        def run(self, choices):
            raced.append(choices)
            for rows in (1, 8):
                self._step(rows)
            return 1

    class Told(StepThreads):
        def took(self, num_rows, num_tokens, seconds):
            told.append((num_rows, num_tokens))

    monkeypatch.setattr(device, "thread_choices", lambda: (1, 2))
    monkeypatch.setattr(loading, "ThreadRace", Race)
    monkeypatch.setattr(loading, "StepThreads", Told)
    config = {"model": {"numerics": numerics}, "kv": {"num_pages": 64}, "scheduler": {"max_running": 4}}
    with LLM(str(DEMO), progress=False, config={**config, "device": {"kind": "cpu"}}) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), progress=False)
    assert raced == ([(1, 2)] if numerics == "fast" else [])
    assert told[:3] == ([(1, 4), (1, 5), (1, 6)] if numerics == "fast" else [])


def test_a_later_start_takes_the_number_of_an_earlier_one_and_leaves_its_check_to_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine(lambda threads, rows: 0.002 * rows * (1 if threads == 2 else 1.5))
    first = machine.race(kept=KeptResults("threads", "a processor", "a model", int))
    assert first.run((1, 2)) == 2
    assert first.is_measured
    whole = len(machine.steps)
    machine.steps.clear()
    later = machine.race(kept=KeptResults("threads", "a processor", "a model", int))
    assert later.run((1, 2)) == 2
    assert machine.threads == 2
    assert not machine.steps
    assert not later.is_measured
    # A number that is no choice here, and another model, are measured.
    machine.cost = lambda threads, rows: 0.002 * rows * (1.5 if threads == 2 else 1)
    other = machine.race(kept=KeptResults("threads", "a processor", "another model", int))
    assert other.run((1, 2)) == 1
    assert other.is_measured
    assert len(machine.steps) == whole
    assert later.run((1, 3)) in (1, 3)
    assert later.is_measured


def test_ranks_that_share_a_model_keep_no_number(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine, kept = Machine(lambda threads, rows: 0.01 * rows / threads), KeptResults("threads", "", "", int)
    assert machine.race(Two(0.0), kept).run((1, 2)) == 2
    assert kept.load() is None


@pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")
def test_each_number_is_measured_with_the_steps_that_it_would_run(monkeypatch):
    ran = []

    def noted(kind, method):
        run = getattr(kind, method)

        def noting(*given):
            ran.append((kind, torch.get_num_threads()))
            return run(*given)

        monkeypatch.setattr(kind, method, noting)

    class Race(ThreadRace):
        def run(self, choices):
            for threads in choices:
                self._set_threads(threads)
                self._step(8)
            self._set_threads(1)
            return 1

    noted(ModelSteps, "run")
    noted(CompiledDecodes, "launch")
    monkeypatch.setattr(device, "thread_choices", lambda: (1, 2))
    monkeypatch.setattr(loading, "ThreadRace", Race)
    config = {"kv": {"num_pages": 64}, "scheduler": {"max_running": 4}, "device": {"kind": "cpu"}}
    with LLM(str(DEMO), progress=False, config=config) as llm:
        assert ran == [(CompiledDecodes, 1), (CompiledDecodes, 2)]
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), progress=False)
    assert ran[2:5] == [(CompiledDecodes, 1)] * 3
