"""The flat layout of a step: decodes first, then prefill segments, each token with its row and position."""

import numpy as np
import pytest

from engine.execution.batch import lay_out
from engine.execution.captured_steps import token_places
from engine.execution.launched_step import sampled_places
from engine.messages import Step


def int32(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def test_a_pure_decode_step_has_one_token_per_row() -> None:
    computed = np.array([10, 20, 30, 40], dtype=np.int32)
    batch = lay_out(Step(step_id=0, decode_rows=int32(2, 0)), computed)
    assert batch.num_decodes == 2
    assert batch.rows_T.tolist() == batch.rows_B.tolist() == [2, 0]
    assert batch.positions_T.tolist() == [30, 10]
    assert batch.lengths_B.tolist() == [31, 11]
    assert batch.sample_at_N.tolist() == [0, 1]
    assert batch.sample_positions_N.tolist() == [31, 11]
    assert computed.tolist() == [11, 20, 31, 40]


def test_a_mixed_step_puts_segments_behind_the_decodes() -> None:
    computed = np.array([10, 0, 4, 7], dtype=np.int32)
    step = Step(
        step_id=0,
        decode_rows=int32(3),
        prefill_rows=int32(1, 2),
        prefill_starts=int32(0, 4),
        prefill_lengths=int32(3, 2),
        prefill_samples=int32(0, 1),
    )
    batch = lay_out(step, computed)
    assert batch.rows_T.tolist() == [3, 1, 1, 1, 2, 2]
    assert batch.positions_T.tolist() == [7, 0, 1, 2, 4, 5]
    assert batch.query_lengths_B.tolist() == [1, 3, 2]
    assert batch.lengths_B.tolist() == [8, 3, 6]
    assert batch.sample_at_N.tolist() == [0, 5], "the segment in the middle of its prompt samples nothing"
    assert batch.sample_rows_N.tolist() == [3, 2]
    assert batch.sample_positions_N.tolist() == [8, 6]
    assert computed.tolist() == [10, 3, 6, 8]


def test_a_batch_keeps_its_lengths_when_the_next_step_is_laid_out() -> None:
    computed = np.array([10], dtype=np.int32)
    first = lay_out(Step(step_id=0, decode_rows=int32(0)), computed)
    lay_out(Step(step_id=1, decode_rows=int32(0)), computed)
    assert (first.lengths_B.tolist(), first.positions_T.tolist()) == ([11], [10])


VERIFIES = {
    "prefill_rows": int32(1, 2),
    "prefill_starts": int32(5, 4),
    "prefill_lengths": int32(3, 1),
    "prefill_samples": int32(3, 1),
}


@pytest.mark.parametrize("verified", [{}, VERIFIES], ids=["decodes alone", "tokens are verified"])
def test_the_places_of_a_captured_step_are_those_of_its_layout(verified: dict[str, bytes]) -> None:
    step = Step(step_id=0, decode_rows=int32(3, 0), **verified)
    computed = np.array([10, 9, 4, 7], dtype=np.int32)
    laid_out = computed.copy()
    batch = lay_out(step, laid_out)
    rows, given = token_places(step)
    assert rows.tolist() == batch.rows_T.tolist()
    assert given.tolist() == [-1, -1, *batch.positions_T[2:].tolist()], "the device has the lengths of decodes"
    rows, positions = sampled_places(step, computed)
    assert rows.tolist() == batch.sample_rows_N.tolist()
    assert positions.tolist() == batch.sample_positions_N.tolist()
    assert computed.tolist() == laid_out.tolist()


def test_a_decode_step_that_runs_whole_is_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout takes several times as long as the places alone, in each step of a CPU."""
    monkeypatch.delattr("engine.execution.launched_step.lay_out")
    rows, positions = sampled_places(Step(step_id=0, decode_rows=int32(1)), np.array([3, 4], dtype=np.int32))
    assert (rows.tolist(), positions.tolist()) == ([1], [5])
