"""The planner's half of pictures: chunks that cut none, requests that go on, and what ranks are sent."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from engine.features.images.messages import EncodePicture, PictureEncoded
from engine.features.images.planner import FILES, ImagesPlanner
from engine.messages import Finish, Step
from engine.text.pictures import NAME, PlacedPicture, picture_ids
from engine.types.errors import RequestError
from engine.types.prompt import RequestPart
from engine.types.spans import WholeSpan, spans_of
from tests.scheduling.bench import Bench, lose_the_device, prompt_of


def placed(key: str, start: int, length: int = 16) -> PlacedPicture:
    """A picture that must be computed at once."""
    places = np.arange(start, start + length, dtype=np.int32)
    return PlacedPicture(key, b"file", places.tobytes(), (0, 0, 0), True)


class Pictured:
    """A bench whose prompts have pictures.  Its one rank encodes each picture when ``answer`` is called."""

    def __init__(self, num_rows: int = 1000, **limits: int) -> None:
        self.bench = Bench(depth=1, num_pages=256, features=[partial(ImagesPlanner, num_rows=num_rows)], **limits)
        self.whole: dict[int, list[PlacedPicture]] = {}

    def submit(self, request_id: int, length: int, *pictures: PlacedPicture, seed: int = 0) -> None:
        """Submit a prompt of this length."""
        prompt = prompt_of(length, seed=seed)
        for one in pictures:
            prompt[one.places_n] = picture_ids(one.key, len(one.places_n))
        part = RequestPart("", msgspec.msgpack.encode(pictures))
        self.whole[request_id] = list(pictures)
        adapter = SimpleNamespace(parts={NAME: part})
        self.bench.submit(request_id, prompt, max_tokens=2, ignore_eos=True, adapter=adapter)  # type: ignore[arg-type]

    def answer(self, reason: str = "") -> list[EncodePicture]:
        """Answer all that was sent to the rank.  Return it."""
        sent = self.bench.planner.outgoing()
        for message in sent:
            if EncodePicture.of(message).picture is not None:
                self.bench.planner.received(PictureEncoded(reason).message(0, message.number))
        return [EncodePicture.of(message) for message in sent]

    def finish(self) -> None:
        """Run until every request has ended, and check each step."""
        for _ in range(200):
            self.answer()
            if self.bench.plan():
                self.check(self.bench.steps[-1])
                self.bench.deliver()
        assert self.bench.streams == self.bench.expected

    def check(self, step: Step) -> None:
        """Check that a step has pictures whole."""
        for row, start, end in segments(step):
            for one in self.whole[int(self.bench.planner.table.request_ids[row])]:
                assert not start <= one.start < end < one.end, f"a step ends at {end}, in {one.start} to {one.end}"


def segments(step: Step) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of each prompt in a step."""
    columns = (step.prefill_rows, step.prefill_starts, step.prefill_lengths)
    rows, starts, lengths = (np.frombuffer(one, dtype=np.int32) for one in columns)
    return zip(rows.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)


def test_a_burst_of_pictures_leaves_each_whole_and_no_step_is_longer_by_more_than_one() -> None:
    pictured = Pictured(max_running=8, max_step_tokens=40, prefill_chunk=12)
    for request_id in range(8):
        pictured.submit(request_id, 90, *(placed(f"{request_id} {at}", at) for at in (6, 24, 41, 60)), seed=request_id)
    pictured.finish()
    (step, *_), (one, *_) = pictured.bench.steps, pictured.whole[0]
    assert WholeSpan(0, one.start, one.end) in spans_of(step.parts), "nothing else cuts it"
    sizes = [sum(end - start for _, start, end in segments(step)) for step in pictured.bench.steps]
    assert max(sizes) < 40 + 16


def test_a_picture_longer_than_a_step_is_refused_with_the_setting() -> None:
    with pytest.raises(RequestError, match=r"has 41 tokens.*scheduler.max_step_tokens=40"):
        Pictured(max_step_tokens=40).submit(0, 90, placed("long", 6, 41))


def test_a_picture_behind_one_whose_beginning_is_cached_stays_whole() -> None:
    pictured = Pictured(prefill_chunk=16, max_step_tokens=16, max_running=1)
    pictured.submit(0, 22, placed("a", 6))
    pictured.finish()
    pictured.submit(1, 60, placed("a", 6), placed("b", 24))
    pictured.finish()
    assert 6 < pictured.bench.cached[1] < 22, "the cached pages end in the first picture"


def test_requests_that_need_more_pictures_than_they_keep_do_not_wait_for_each_other() -> None:
    pictured = Pictured(num_rows=20, max_running=2)
    planner = pictured.bench.planner
    for request_id in range(2):
        pictured.submit(request_id, 40, placed(f"{request_id} first", 2, 10), seed=request_id)
    pictured.finish()
    for request_id in range(2, 4):
        mine = (placed(f"{request_id - 2} first", 2, 10), placed(f"{request_id} second", 20, 10))
        pictured.submit(request_id, 50, *mine, seed=request_id - 2)
    assert planner.next_step() is None, "both wait for their second picture"
    planner.pages.allocator.evict(planner.pages.tree.evict(20))  # the first ones are needed, too
    pictured.finish()


def test_a_picture_that_fails_is_forgotten_before_it_is_encoded_again() -> None:
    pictured = Pictured()
    bad, good = placed("bad", 2), placed("good", 20)
    pictured.submit(0, 40, bad, good)
    pictured.submit(1, 40, bad)
    assert pictured.bench.planner.next_step() is None
    (images,) = (one for one in pictured.bench.planner.features.all if isinstance(one, ImagesPlanner))
    images._cache.take(-1, (bad,))  # a row that started from pages that were cached meanwhile
    first, other = pictured.bench.planner.outgoing()
    pictured.bench.planner.received(PictureEncoded("out of memory", 500).message(0, first.number))
    pictured.bench.planner.received(PictureEncoded().message(0, other.number))
    pictured.bench.read()
    assert pictured.bench.ends == {0: [Finish.ERROR], 1: [Finish.ERROR]}
    assert pictured.answer() == [EncodePicture(None, ("bad",))], "no request is left that needs it"
    pictured.submit(2, 40, bad)
    assert pictured.bench.planner.next_step() is None
    assert [sent.picture.key for sent in pictured.answer() if sent.picture is not None] == ["bad"]


def test_requests_with_a_picture_keep_one_file_of_it() -> None:
    pictured = Pictured(max_running=2)
    for request_id in range(3):
        pictured.submit(request_id, 40 + request_id, placed("a", 2), placed(f"{request_id}", 22), seed=request_id)
    notes = [one.notes for one in pictured.bench.planner.requests.open.values()]
    assert [sorted(one[FILES]) for one in notes] == [["0", "a"], ["1", "a"], ["2", "a"]]
    assert len({id(one[FILES]["a"]) for one in notes}) == 1
    assert len({id(one[FILES][str(number)]) for number, one in enumerate(notes)}) == 3
    assert not any(one.data for note in notes for one in note[NAME])
    pictured.finish()


def test_ranks_that_stay_loaded_forget_the_pictures_from_before() -> None:
    pictured = Pictured()
    pictured.submit(0, 40, placed("a", 2))
    pictured.finish()
    lose_the_device(pictured.bench)
    pictured.submit(1, 60, placed("b", 2), placed("c", 22), seed=1)
    assert pictured.bench.planner.next_step() is None
    assert [sent.forget for sent in pictured.answer()] == [("a",), ()]
    pictured.finish()
