"""Recorded runs of the simulation: real actors, faults of every kind, virtual time.

Owns: how a recorder gets into a simulated engine.  Does not know: what is done with its files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from engine.config import Config
from engine.plugins.manager import Plugins
from engine.recording import state
from engine.recording.blueprint import Blueprint
from engine.recording.file import Recording, read_recording
from engine.recording.recorder import RecordedScheduler, Recorder
from engine.scheduling.planner import Planner
from engine.scheduling.rows import PlannerLimits
from tests.sim import assembly, probe
from tests.sim.dice import draw
from tests.sim.oracle import VOCAB
from tests.sim.scenario import Scenario
from tests.sim.world import World


class SimBlueprint(Blueprint, frozen=True):
    """Builds what the simulation builds, strange proposers among it."""

    setup: Any = None

    def planner(self, plugins: Plugins, num_pages: int, clock: Any) -> Planner:
        return ORIGINAL(replace(self.setup, record_events=False), num_pages, clock)


ORIGINAL = probe.build_planner


def blueprint_of(scenario: Scenario) -> SimBlueprint:
    setup = scenario.setup
    limits = PlannerLimits(
        max_running=setup.max_running, max_step_tokens=setup.max_step_tokens, prefill_chunk=setup.prefill_chunk,
        page_size=setup.page_size, num_pages=setup.num_pages, max_len=setup.max_len, eos_token_ids=setup.eos_token_ids,
    )  # fmt: skip
    names = {"eviction": f"eviction.{setup.eviction}", "policy": f"policy.{setup.policy}"}
    return SimBlueprint(limits, setup.overlap, VOCAB, setup.max_len, names, Config(), setup=setup)


@contextmanager
def strange_plugins() -> Iterator[None]:
    """The simulation's proposers may come back from a state."""
    with mock.patch.object(state, "MODULES", (*state.MODULES, "tests", "engine.plugins")):
        yield


def run_recorded(scenario: Scenario, folder: Path, limit_bytes: int, prompts: str = "whole") -> tuple[World, Recorder]:
    """A run with a recorder; it writes nothing that nobody asks for."""
    recorder = Recorder(
        blueprint_of(scenario), Plugins({}), folder=folder, limit_bytes=limit_bytes, prompts=prompts, waited_s=1e9
    )
    recorder.alert = lambda why: None  # type: ignore[method-assign]
    recorder.write_at_last = lambda why: None  # type: ignore[method-assign]

    def build(setup: Any, num_pages: int, clock: Any) -> Planner:
        recorder.now = clock
        return ORIGINAL(setup, num_pages, recorder.clock)

    scheduler = partial(RecordedScheduler, recorder=recorder)
    with mock.patch.object(assembly, "Scheduler", scheduler), mock.patch.object(probe, "build_planner", build):
        world = World(scenario)
        world.run()
    return world, recorder


def written(recorder: Recorder, folder: Path, scenario: Scenario, name: str = "run.cbr") -> Recording:
    """What it writes now, read again."""
    recorder.write("test", name)
    assert recorder._writing is not None
    recorder._writing.join()
    recording = read_recording(folder / name)
    header = msgspec.structs.replace(recording.header, blueprint=blueprint_of(scenario))
    return Recording(header, recording.state, recording.turns, recording.torn)


__all__ = ["blueprint_of", "draw", "run_recorded", "strange_plugins", "written"]
