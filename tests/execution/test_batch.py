"""The flat layout of a step: decodes first, then prefill segments, each token with its row and position."""

import numpy as np

from engine.execution.batch import lay_out
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
