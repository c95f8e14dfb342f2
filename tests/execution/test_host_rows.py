"""Rows in the host's memory: whatever the steps, their tables and what a model gets are those of ``DeviceRows``."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from engine.execution.batch import lay_out
from engine.execution.host_rows import HostRows
from engine.execution.rows import DeviceRows, StepInputs
from engine.messages import Admission, Step
from engine.types.params import SamplingParams

NUM_ROWS, MAX_LEN, PAGE_SIZE, PAGE_STRIDE = 6, 50, 4, 12
NUM_PAGES = -(-MAX_LEN // PAGE_SIZE)


def int32(numbers: np.ndarray) -> bytes:
    return numbers.astype(np.int32).tobytes()


def random_steps(rng: np.random.Generator) -> list[Step]:
    """One that admits and prefills all rows, one that decodes some and goes on with the prompts of others, decodes."""
    pages = rng.permutation(NUM_ROWS * NUM_PAGES).reshape(NUM_ROWS, NUM_PAGES)
    lengths = rng.integers(6, 20, NUM_ROWS)
    rows, early = rng.permutation(NUM_ROWS), 3
    admissions = tuple(
        Admission(
            row=row,
            token_ids=int32(rng.integers(0, 99, 20)),
            num_prompt_tokens=int(lengths[row]),
            num_computed_tokens=0,
            pages=int32(pages[row, :8]),
            params=SamplingParams(),
        )
        for row in rows.tolist()
    )
    first = lengths[rows] - 4
    first[:early] = lengths[rows[:early]]
    samples = np.arange(NUM_ROWS) < early
    starts, ones = np.zeros(NUM_ROWS), np.ones(NUM_ROWS)
    columns = {"prefill_rows": rows, "prefill_starts": starts, "prefill_lengths": first, "prefill_samples": samples}
    steps = [Step(step_id=0, admissions=admissions, **{name: int32(one) for name, one in columns.items()})]
    appends = {"table_rows": rows, "table_indexes": 8 * ones, "table_pages": pages[rows, 8]}
    columns = {
        "decode_rows": rows[:early],
        "prefill_rows": rows[early:],
        "prefill_starts": first[early:],
        "prefill_lengths": 4 * ones[early:],
        "prefill_samples": 3 * ones[early:],  # as where proposals are verified
    }
    steps.append(Step(step_id=1, **{name: int32(one) for name, one in {**columns, **appends}.items()}))
    return [*steps, *(Step(step_id=step_id, decode_rows=int32(rng.permutation(rows)[:4])) for step_id in range(2, 9))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", [None, 1])
def test_steps_leave_and_give_what_those_of_another_device_do(seed: int, ahead: int | None) -> None:
    rng, found = np.random.default_rng(seed), list[tuple[list[StepInputs], DeviceRows]]()
    sampled = rng.integers(-1, 99, (9, 3 * NUM_ROWS))
    for kind in (DeviceRows, HostRows):
        rows = own = kind(NUM_ROWS, MAX_LEN, PAGE_SIZE, torch.device("cpu"), PAGE_STRIDE)
        if ahead is not None:
            rows = own.for_pool(PAGE_SIZE, ahead)
        inputs = []
        for step, token_ids in zip(random_steps(np.random.default_rng(seed)), sampled, strict=True):
            rows.apply(step)
            inputs.append(rows.inputs(lay_out(step, rows.computed)))
            write_at_N = inputs[-1].write_at_N
            rows.write_sampled(write_at_N, torch.from_numpy(token_ids[: len(write_at_N)]))
        found.append((inputs, own))
    (device_inputs, device_rows), (host_inputs, host_rows) = found
    assert torch.equal(host_rows.tokens_RM, device_rows.tokens_RM)
    assert torch.equal(host_rows.pages_RP, device_rows.pages_RP)
    for ours, theirs in zip(host_inputs, device_inputs, strict=True):
        for field in fields(StepInputs):
            if field.name == "shares":  # of kernels that no step of the host's has
                continue
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert one.dtype == other.dtype, field.name
            assert one.is_contiguous(), field.name
            assert torch.equal(one, other), field.name


def test_rows_share_pages_where_two_begin_with_the_same_one():
    rows = DeviceRows(NUM_ROWS, MAX_LEN, PAGE_SIZE, torch.device("cpu"), PAGE_STRIDE)

    def shares(decodes: list[int], admitted: dict[int, list[int]], **written: bytes) -> bool:
        """Whether these rows do, after others are admitted and places of their tables are written."""
        admissions = tuple(
            Admission(
                row=row,
                token_ids=int32(np.arange(9)),
                num_prompt_tokens=9,
                num_computed_tokens=8,
                pages=int32(np.array(pages)),
                params=SamplingParams(),
            )
            for row, pages in admitted.items()
        )
        step = Step(step_id=1, admissions=admissions, decode_rows=int32(np.array(decodes)), **written)
        rows.apply(step)
        return rows.inputs(lay_out(step, rows.computed)).shares

    assert not shares([0, 1, 2], {0: [5, 6, 7], 1: [8, 9, 4], 2: [1, 2, 3]})
    assert shares([0, 1, 3], {3: [5, 6, 10]})
    assert not shares([1, 3], {})
    moved = {"table_rows": int32(np.array([1, 2])), "table_pages": int32(np.array([5, 5]))}
    assert shares([1, 2, 3], {}, **moved, table_indexes=int32(np.array([0, 1])))
    assert not shares([2, 3], {})
