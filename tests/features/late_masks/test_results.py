"""Results of steps name the rows whose masks are late, and outputs are those of masks that are never late."""

import math
from concurrent.futures import Future

import msgspec
import pytest
import torch

from callboard import LLM, SamplingParams
from engine.features.late_masks.planner import LateMasks
from engine.sampling import constraints
from engine.types.params import Grammar


def test_a_result_names_the_rows_whose_masks_are_not_ready() -> None:
    ready: Future[None] = Future()
    ready.set_result(None)
    rows = constraints.Constraints(None, 8, torch.device("cpu"))
    rows.ahead = {4: Future(), 5: ready, 6: Future()}
    encode = rows.late()
    rows.ahead[7] = Future()  # of a later step
    assert msgspec.msgpack.decode(encode()) == [4, 6]
    assert LateMasks.part == constraints.LATE_MASKS


def test_outputs_are_the_same_whether_all_masks_are_late_or_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sat_out: list[int] = []
    sit_out = LateMasks._sit_out

    def noted(late_masks: LateMasks, row: int) -> None:
        sat_out.append(row)
        sit_out(late_masks, row)

    monkeypatch.setattr(LateMasks, "_sit_out", noted)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    bound = SamplingParams(temperature=0.0, max_tokens=24, grammar=Grammar("regex", "[a-z ]{20,40}"))
    outputs = []
    for late_s in (math.inf, -1.0):
        monkeypatch.setattr(constraints, "LATE_S", late_s)
        with LLM("examples/demo_model", progress=False) as llm:
            results = llm.generate(["import os", "def f(", "class A"], [plain, bound, bound])
        outputs.append([one.text for one in results])
        assert bool(sat_out) == (late_s < 0)
    assert outputs[0] == outputs[1]
