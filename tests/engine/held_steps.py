"""Executors of this process that take their time, and can be held before their next step."""

import threading
import time

import pytest

from engine.actors.runner import PendingStep
from engine.actors.step_splitting import StepSplitter
from engine.messages import Step
from tests.pace import far

PACE_S = 0.005  # at least, of a step: no stream is over before a test has looked at it


def hold_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While what this returns is not set, no step begins."""
    launch, go = StepSplitter.launch, threading.Event()
    go.set()

    def held(self: StepSplitter, step: Step) -> PendingStep:
        assert go.wait(far(60))
        time.sleep(PACE_S)
        return launch(self, step)

    monkeypatch.setattr(StepSplitter, "launch", held)
    return go
