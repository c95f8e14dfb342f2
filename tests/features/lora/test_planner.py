"""Slots for adapters: which adapter is in which slot, which leave, and which requests wait."""

import random

import msgspec
import pytest

from engine.features.lora.files import NAME, Adapter, Placement
from engine.features.lora.messages import AdapterRead, ReadAdapter
from engine.features.lora.slots import AdapterSlots
from engine.messages import Finish
from tests.scheduling.bench import Bench, prompt_of


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/adapters/{name}")


def test_an_adapter_stays_until_another_needs_its_slot() -> None:
    slots = AdapterSlots(2)
    assert slots.take(0, adapter("a")) == (1, True)
    assert slots.take(1, adapter("a")) == (1, False)
    slots.release(0)
    slots.release(1)
    assert slots.take(0, adapter("b")) == (2, True)
    slots.release(0)
    assert slots.take(0, adapter("a")) == (1, False)  # so b is the one that was not used for the longest
    slots.release(0)
    assert slots.take(0, adapter("c")) == (2, True)
    assert slots.take(1, adapter("a")) == (1, False)


def test_one_that_is_read_never_leaves_and_others_wait() -> None:
    slots = AdapterSlots(1)
    slots.take(0, adapter("a"))
    assert slots.has_room(adapter("a"))
    assert not slots.has_room(adapter("b"))
    slots.release(0)
    assert slots.take(3, adapter("b")) == (1, True)


def test_what_could_not_be_read_is_placed_anew() -> None:
    slots = AdapterSlots(1)
    slots.take(0, adapter("a"))
    slots.forget(0)
    assert not slots.has_room(adapter("a"))  # its row has not left
    slots.release(0)
    assert slots.take(0, adapter("a")) == (1, True)


def test_thousands_of_adapters_come_and_go_without_a_trace() -> None:
    slots, rng = AdapterSlots(4), random.Random(3)
    held: dict[int, str] = {}
    inside: dict[int, str] = {}
    for _ in range(5000):
        row = rng.randrange(8)
        if row in held:
            slots.release(row)
            del held[row]
            continue
        name = f"{rng.randrange(1000)}"
        if not slots.has_room(adapter(name)):
            assert len(set(held.values())) == 4
            assert name not in held.values()
            continue
        number, is_new = slots.take(row, adapter(name))
        assert is_new == (inside.get(number) != name)
        inside[number] = held[row] = name
    for row in held:
        slots.release(row)
    assert not slots._of_row
    assert not any(slot.rows for slot in slots._slots)


def lose_the_adapter(bench: Bench) -> None:
    """Lose the adapter of the row that starts in the last step that has run."""
    done, row = bench.device.done.pop(), bench.steps[-1].admissions[-1].row
    bench.device.done.append(msgspec.structs.replace(done, parts={NAME: msgspec.msgpack.encode({row: "gone"})}))


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_without_its_adapter_says_nothing_wherever_its_row_is(depth: int, max_tokens: int) -> None:
    bench = Bench(depth=depth, num_slots=1)
    bench.submit(1, prompt_of(9), max_tokens=6, ignore_eos=True)
    bench.submit(2, prompt_of(7, seed=1), max_tokens=max_tokens, adapter=adapter("a"))
    bench.step()  # meanwhile the adapter is read
    bench.plan()
    lose_the_adapter(bench)
    bench.finish()
    assert (bench.streams[2], bench.ends[2]) == ([], [Finish.ERROR])
    assert bench.streams[1] == bench.expected[1]


def test_the_next_request_does_not_trust_a_slot_that_was_lost_on_one_that_has_ended() -> None:
    bench = Bench(num_slots=1)
    bench.submit(1, prompt_of(7), adapter=adapter("a"))
    bench.plan()
    lose_the_adapter(bench)
    bench.planner.abort(1)
    bench.finish()
    bench.submit(2, prompt_of(7), max_tokens=5, adapter=adapter("a"))
    bench.plan()
    (placed,) = msgspec.msgpack.decode(bench.steps[-1].parts[NAME], type=list[Placement])
    assert placed.adapter == adapter("a")


def test_the_step_of_another_request_does_not_wait_for_the_files_of_an_adapter() -> None:
    bench = Bench(num_slots=1)
    bench.reads_adapters = False
    bench.submit(1, prompt_of(9), max_tokens=6, ignore_eos=True, adapter=adapter("slow"))
    bench.submit(2, prompt_of(7, seed=1), max_tokens=6, ignore_eos=True)
    while bench.plan() or bench.deliver():
        pass
    assert (bench.streams[1], bench.streams[2]) == ([], bench.expected[2])
    assert bench.planner.stats().waiting == 1
    assert bench.answer_readings()
    bench.finish()
    assert bench.streams[1] == bench.expected[1]
    (placed,) = msgspec.msgpack.decode(bench.steps[-6].parts[NAME], type=list[Placement])
    assert placed == Placement(placed.row, 1, adapter("slow"), is_read=True)


def test_an_adapter_is_read_once_for_all_that_want_it_and_as_many_as_there_are_slots() -> None:
    bench = Bench(num_slots=2, max_running=4)
    bench.reads_adapters = False
    for number, name in enumerate("aabbc"):
        bench.submit(number, prompt_of(5, seed=number), max_tokens=3, ignore_eos=True, adapter=adapter(name))
    assert not bench.plan()
    asked = [ReadAdapter.of(one).adapter.digest for one in bench.planner.outgoing()]
    assert asked == ["a", "b"]
    bench.planner.received(AdapterRead().message(rank=0, number=0))
    bench.planner.received(AdapterRead().message(rank=0, number=1))
    assert bench.plan()
    (third,) = bench.planner.outgoing()
    assert ReadAdapter.of(third) == ReadAdapter(adapter("c"))
    bench.planner.received(AdapterRead().message(rank=0, number=third.number))
    bench.finish()
    assert bench.streams == bench.expected


def test_an_adapter_that_cannot_be_read_ends_its_requests_and_no_other() -> None:
    bench = Bench(num_slots=2)
    bench.reads_adapters = False
    for number, name in enumerate(("gone", "gone", "", "here")):
        wanted = adapter(name) if name else None
        bench.submit(number, prompt_of(5, seed=number), max_tokens=3, ignore_eos=True, adapter=wanted)
    bench.plan()
    first, second = bench.planner.outgoing()
    bench.planner.received(AdapterRead("no such file").message(rank=0, number=first.number))
    bench.planner.received(AdapterRead().message(rank=0, number=second.number))
    (dropped,) = bench.planner.outgoing()
    assert ReadAdapter.of(dropped) == ReadAdapter(adapter("gone"), drop=True)
    bench.finish()
    assert [bench.ends[number] for number in (0, 1)] == [[Finish.ERROR]] * 2
    assert [bench.streams[number] for number in (2, 3)] == [bench.expected[number] for number in (2, 3)]


def test_what_nothing_wants_any_more_is_dropped() -> None:
    bench = Bench(num_slots=1)
    bench.reads_adapters = False
    for number in range(2):
        bench.submit(number, prompt_of(5, seed=number), adapter=adapter("a"))
    bench.plan()
    (asked,) = bench.planner.outgoing()
    bench.planner.abort(0)
    assert bench.planner.outgoing() == []
    bench.planner.received(AdapterRead().message(rank=0, number=asked.number))
    bench.planner.abort(1)
    (dropped,) = bench.planner.outgoing()
    assert ReadAdapter.of(dropped) == ReadAdapter(adapter("a"), drop=True)
    assert bench.planner.stats().waiting == 0
