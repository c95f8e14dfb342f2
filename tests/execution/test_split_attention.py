"""Two backends behind one: who gets which part of a step, told as a step of its own."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.split_attention import SplitAttention
from engine.layers.attention import AttentionBatch


class Recorder:
    """Marks the rows that it is given, and keeps its batches."""

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.batches: list[AttentionBatch] = []

    def plan_step(self, batch: AttentionBatch) -> None:
        self.batches.append(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        assert len(q_TNH) == self.batches[-1].query_starts_B1[-1], "the rows are not those of its batch"
        return q_TNH + self.mark * (layer + 1)


def batch_of(decodes: Sequence[int], segments: Sequence[tuple[int, int]]) -> AttentionBatch:
    """Lengths of decode rows; (length, queries) of segments."""
    lengths = np.array([*decodes, *(length for length, _ in segments)], dtype=np.int32)
    queries = np.array([1] * len(decodes) + [count for _, count in segments], dtype=np.int32)
    return AttentionBatch(
        num_decodes=len(decodes),
        page_table_BP=torch.arange(3 * len(lengths), dtype=torch.int32).view(-1, 3),
        lengths_B=torch.from_numpy(lengths),
        query_starts_B1=torch.from_numpy(np.concatenate(([0], queries.cumsum())).astype(np.int32)),
        host_lengths=lengths,
        host_query_lengths=queries,
    )


@pytest.mark.parametrize(
    ("decodes", "segments"), [([5, 7, 2], [(9, 4), (3, 3), (8, 1)]), ([5, 7], []), ([], [(9, 4), (1, 1)])]
)
def test_each_part_is_a_step_of_its_own(decodes: list[int], segments: list[tuple[int, int]]) -> None:
    prefill, decode = Recorder(100.0), Recorder(1.0)
    split, batch = SplitAttention(prefill, decode), batch_of(decodes, segments)
    split.plan_step(batch)
    for recorder, first, last in ((decode, 0, len(decodes)), (prefill, len(decodes), len(batch.host_lengths))):
        if first == last:
            assert not recorder.batches, "one that has nothing to do is not asked"
            continue
        (part,) = recorder.batches
        assert part.num_decodes == (len(decodes) if recorder is decode else 0)
        assert part.page_table_BP.tolist() == batch.page_table_BP[first:last].tolist()
        assert part.lengths_B.tolist() == part.host_lengths.tolist() == batch.host_lengths[first:last].tolist()
        assert part.host_query_lengths.tolist() == batch.host_query_lengths[first:last].tolist()
        assert part.query_starts_B1.tolist() == [0, *part.host_query_lengths.cumsum().tolist()]
        assert part.query_starts_B1.dtype == torch.int32
    num_rows = len(decodes) + sum(count for _, count in segments)
    q_TNH = torch.zeros((num_rows, 2, 4))
    out_TNH = split.attend(1, q_TNH)
    expected = [2.0] * len(decodes) + [200.0] * (num_rows - len(decodes))
    assert out_TNH[:, 0, 0].tolist() == expected


def test_steps_of_other_kinds_may_follow() -> None:
    prefill, decode = Recorder(100.0), Recorder(1.0)
    split = SplitAttention(prefill, decode)
    for decodes, segments in (([5], [(2, 2)]), ([5], []), ([], [(3, 3)]), ([1, 2], [(3, 3)])):
        split.plan_step(batch_of(decodes, segments))
        num_rows = len(decodes) + sum(count for _, count in segments)
        marks = split.attend(0, torch.zeros((num_rows, 1, 1))).flatten().tolist()
        assert marks == [1.0] * len(decodes) + [100.0] * (num_rows - len(decodes))


class Capturable(Recorder):
    def for_graph(self, batch: AttentionBatch) -> tuple[str, AttentionBatch]:
        return f"graph of {self.mark}", batch


def test_a_graph_is_built_by_the_backend_of_decode_rows_and_only_if_it_can() -> None:
    batch = batch_of([3, 4], [])
    for prefill in (Recorder(1.0), Capturable(1.0)):
        said, of = SplitAttention(prefill, Capturable(2.0)).for_graph(batch)
        assert said == "graph of 2.0"
        assert of is batch
    assert not hasattr(SplitAttention(Capturable(1.0), Recorder(2.0)), "for_graph")


@pytest.mark.parametrize("capturable", [False, True])
def test_a_captured_step_asks_the_backend_of_decode_rows(capturable: bool) -> None:
    prefill, decode = Recorder(1.0), Recorder(2.0)
    decode.capturable = capturable  # type: ignore[attr-defined]
    assert SplitAttention(prefill, decode).capturable == capturable
    assert not SplitAttention(decode, prefill).capturable
