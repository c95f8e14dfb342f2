"""A device without room for a step: the step is run in parts, and its result is that of the whole step."""

from collections import deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.echo_executor import Pending
from engine.actors.runner import Runner
from engine.actors.step_splitting import IN_PARTS, StepSplitter, halves, merged, num_tokens, together
from engine.execution.launched_step import extras_by_row
from engine.messages import Step, StepDone, StepExtras
from engine.types.errors import StepTooLarge
from engine.types.logprobs import Logprobs, PromptLogprobs
from engine.types.spans import WholeSpan, part_of
from tests.scheduling.bench import Bench, prompt_of
from tests.scheduling.fake_device import FakeDevice


def ints(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


EMPTY = dict.fromkeys(("decode_rows", "prefill_rows", "prefill_starts", "prefill_lengths", "prefill_samples"), b"")


class TightRunner(Runner):
    """A device with room for ``most`` tokens in a step."""

    num_pages = 64

    def __init__(self, device: FakeDevice, most: int) -> None:
        self.device = device
        self.most = most
        self.num_failed = 0

    def launch(self, step: Step) -> Pending:
        if num_tokens(step) > self.most:
            self.num_failed += 1
            self.device.run(msgspec.structs.replace(step, **EMPTY))
            self.device.done.pop()
            raise MemoryError("no room")
        self.device.run(step)
        return Pending(self.device.done.pop(), 0.0)

    def leave(self) -> None:
        pass


class TightDevice:
    """The device of a bench, with little room."""

    def __init__(self, bench: Bench, most: int) -> None:
        self.runner = TightRunner(bench.device, most)
        self.shrinking = StepSplitter(self.runner)
        self.done: deque[StepDone] = deque()

    def run(self, step: Step) -> None:
        self.done.append(self.shrinking.launch(step).collect())


@settings(max_examples=80, deadline=None)
@given(
    most=st.integers(1, 40),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8),
    depth=st.integers(1, 2),
    host=st.booleans(),
)
def test_streams_are_the_same_however_little_fits(
    most: int, lengths: list[tuple[int, int]], depth: int, host: bool
) -> None:
    bench = Bench(depth=depth, max_running=6, max_step_tokens=48, num_pages=30, num_host_pages=8 if host else 0)
    tight = TightDevice(bench, most)
    bench.device = tight  # type: ignore[assignment]
    for request, (length, max_tokens) in enumerate(lengths):
        bench.submit(request, prompt_of(length, seed=request % 3), max_tokens=max_tokens, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected
    assert tight.runner.num_failed <= 7, "a size that failed is not tried again"


def test_a_single_token_that_does_not_fit_is_a_fault() -> None:
    bench = Bench()
    tight = TightDevice(bench, most=0)
    bench.submit(1, prompt_of(5), max_tokens=3)
    step = bench.planner.next_step()
    assert step is not None
    with pytest.raises(MemoryError, match="no room"):
        tight.run(step)


def test_a_rank_among_others_says_how_large_the_step_was_and_cuts_only_by_the_limit_it_was_given() -> None:
    bench = Bench(max_step_tokens=48)
    bench.submit(1, prompt_of(40), max_tokens=3)
    step = bench.planner.next_step()
    assert step is not None
    size = num_tokens(step)
    with pytest.raises(StepTooLarge) as caught:
        StepSplitter(TightRunner(bench.device, most=size - 1), alone=False).launch(step)
    assert caught.value.num_tokens == size > 1

    told = TightRunner(bench.device, most=size - 1)
    StepSplitter(told, alone=False, most_tokens=size // 2).launch(step)
    assert told.num_failed == 0


def test_halves_keep_the_order_and_cut_a_segment_where_the_middle_is() -> None:
    step = Step(
        step_id=7,
        table_rows=ints(1),
        decode_rows=ints(4, 5, 6),
        prefill_rows=ints(0, 1),
        prefill_starts=ints(10, 0),
        prefill_lengths=ints(2, 9),
        prefill_samples=ints(1, 1),
    )
    parts = halves(step)
    assert parts is not None
    first, second = parts
    assert num_tokens(first) + num_tokens(second) == num_tokens(step) == 14
    assert first.prefill_starts == ints(10, 0)
    assert first.prefill_lengths == ints(2, 2)
    assert first.prefill_samples == ints(1, 0)
    assert (second.decode_rows, second.prefill_rows, second.prefill_starts) == (b"", ints(1), ints(2))
    assert (second.prefill_lengths, second.prefill_samples) == (ints(7), ints(1))


@pytest.mark.parametrize(
    ("spans", "lengths"),
    [
        ([], [7, 7]),
        ([(1, 4, 9)], [5, 9]),
        ([(1, 4, 9), (1, 0, 4)], [5, 9]),
        ([(1, 4, 9), (1, 9, 14), (0, 0, 9)], [5, 9]),
        ([(1, 6, 9), (1, 2, 6)], [7, 7]),
        ([(1, 3, 5), (1, 5, 16)], [6, 8]),
    ],
)
def test_no_cut_divides_a_span(spans: list[tuple[int, int, int]], lengths: list[int]) -> None:
    step = Step(
        step_id=7,
        prefill_rows=ints(0, 1),
        prefill_starts=ints(20, 3),
        prefill_lengths=ints(4, 10),
        prefill_samples=ints(1, 1),
        parts=part_of(WholeSpan(*one) for one in spans),
    )
    parts = halves(step)
    assert parts is not None
    assert [num_tokens(part) for part in parts] == lengths


def test_a_span_alone_is_cut_into_nothing_and_its_failure_is_a_fault() -> None:
    step = Step(
        step_id=7,
        decode_rows=ints(2, 3),
        prefill_rows=ints(1),
        prefill_starts=ints(5),
        prefill_lengths=ints(12),
        prefill_samples=ints(0),
        parts=part_of([WholeSpan(1, 0, 9), WholeSpan(1, 9, 16), WholeSpan(1, 16, 20)]),
    )
    parts = halves(step)
    assert parts is not None
    assert [num_tokens(part) for part in parts] == [6, 8]
    further = halves(parts[1])
    assert further is not None
    assert [num_tokens(part) for part in further] == [7, 1]
    assert halves(further[0]) is None


def test_results_of_parts_are_joined_and_a_prompt_that_was_cut_has_both_its_parts() -> None:
    entry = [Logprobs(logprob=-float(index)) for index in range(4)]
    first, middle, last = (PromptLogprobs(first=start, entries=(entry[start],)) for start in (1, 2, 3))
    done = [
        StepDone(
            rank=0,
            step_id=1,
            token_ids=ints(11, -1),
            extras={3: StepExtras(logprobs=entry[0]), 4: StepExtras(failure="no way on")},
            parts={"late_masks": b"3, 5", "lora": b"4"},
        ),
        StepDone(
            rank=0,
            step_id=1,
            token_ids=ints(),
            extras={7: StepExtras(prompt_logprobs=first), 9: StepExtras(prompt_logprobs=middle)},
        ),
        StepDone(
            rank=0,
            step_id=1,
            token_ids=ints(13),
            extras={9: StepExtras(logprobs=entry[3], prompt_logprobs=last, result=b"vector")},
            parts={"late_masks": b"3"},
        ),
    ]
    assert merged(done) == StepDone(
        rank=0,
        step_id=1,
        token_ids=ints(11, -1, 13),
        extras={
            3: StepExtras(logprobs=entry[0]),
            4: StepExtras(failure="no way on"),
            7: StepExtras(prompt_logprobs=first),
            9: StepExtras(
                logprobs=entry[3],
                prompt_logprobs=PromptLogprobs(first=2, entries=(entry[2], entry[3])),
                result=b"vector",
            ),
        },
        note=IN_PARTS,
        parts={"late_masks": b"3", "lora": b"4"},
    )


SAMPLES = {
    "logprobs": Logprobs(logprob=-1.0),
    "prompt_logprobs": PromptLogprobs(first=1, entries=(Logprobs(logprob=-1.0),)),
    "result": b"vector",
    "failure": "no way on",
    "later_logprobs": (Logprobs(logprob=-2.0),),
    "num_accepted": 2,
    "num_rejected": 1,
}


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(StepExtras)])
def test_every_field_of_the_extras_stays_whichever_part_of_the_step_has_it(name: str) -> None:
    extras = extras_by_row({name: {2: SAMPLES[name]}})
    assert extras == {2: StepExtras(**{name: SAMPLES[name]})}
    assert together(extras[2], StepExtras()) == together(StepExtras(), extras[2]) == extras[2]
