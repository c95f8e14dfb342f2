"""Weights that change under a planner: no step, page or token sees two sets of them unless it is to."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from engine.features.weight_updates.messages import (
    Command,
    Drop,
    FreeMemory,
    GiveBack,
    LoadWeights,
    Mode,
    Pause,
    Resume,
    Switch,
    Tag,
    TakeBack,
    Update,
    Weights,
    answer_to,
    command_message,
    request_of,
)
from engine.features.weight_updates.planner import WeightsPlanner
from engine.messages import Finish, Step
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.pages import PageManager
from engine.types.versions import versions
from tests.scheduling.bench import Bench, lose_the_device, prompt_of
from tests.scheduling.fake_device import VOCAB, FakeDevice, expected_output, next_token

NO_WEIGHTS = 99
Mutant = Callable[[pytest.MonkeyPatch], None]


class Rollouts(Bench):
    """A bench whose ranks change their weights.  The tests name weights by their digest."""

    def __init__(self, num_ranks: int = 1, more_features: Sequence[NewFeature] = (), **more: object) -> None:
        features = [partial(WeightsPlanner, path="base"), *more_features]
        super().__init__(features=features, num_ranks=num_ranks, **more)  # type: ignore[arg-type]
        self.num_ranks = num_ranks
        self.loaded = Weights()
        self.tags = {"": 0}  # digest -> what the device mixes into everything that it stores
        self.refuses: dict[int, str] = {}  # rank -> why it cannot read weights
        self.switches = True
        self.loses_answers = False  # to ``Switch``
        self.asked: list[object] = []
        self.marks: dict[int, bytes] = {}
        self.num_commands = 0

    @property
    def feature(self) -> WeightsPlanner:
        return next(one for one in self.planner.features.all if isinstance(one, WeightsPlanner))

    def command(self, command: Command) -> int:
        self.num_commands += 1
        self.planner.received(command_message(self.num_commands, command))
        return self.num_commands

    def update(self, digest: str, mode: Mode | None = None) -> int:
        return self.command(Update(Weights(0, "", f"/{digest}", digest), mode))

    def plan(self) -> bool:
        planned = super().plan()
        return self.answer() or planned

    def answer(self) -> bool:
        """Answer what the ranks are asked."""
        requests = self.planner.outgoing()
        for message in requests:
            request = request_of(message)
            self.asked.append(request)
            match request:
                case LoadWeights(weights):
                    self.loaded = weights
                case Switch(number):
                    assert not self.planner.num_in_flight, "weights change under a step"
                    assert number == self.loaded.number
                    if self.switches:
                        self.device.weights = self.tag(self.loaded.digest)
                case FreeMemory(tags):
                    assert not self.planner.num_in_flight, "memory is given back under a step"
                    self.free(*tags)
            if not isinstance(request, Drop) and not (self.loses_answers and isinstance(request, Switch)):
                for rank in range(self.num_ranks):
                    error = self.refuses.get(rank, "") if isinstance(request, LoadWeights | FreeMemory) else ""
                    self.planner.received(answer_to(message, rank, error))
        return bool(requests)

    def free(self, *tags: str) -> None:
        """Lose what the memory has."""
        if "kv_cache" in tags:
            self.device.forget()
        if "weights" in tags:
            self.device.weights = NO_WEIGHTS

    def read(self) -> None:
        for message in self.planner.outbox:
            for request_id, extras in getattr(message, "extras", {}).items():
                self.marks[request_id] = self.marks.get(request_id, b"") + extras.result
        super().read()

    def tag(self, digest: str) -> int:
        return self.tags.setdefault(digest, len(self.tags))

    def lose(self) -> None:
        lose_the_device(self)
        self.loaded = Weights()

    def run_until_end_of(self, request: int) -> None:
        while not self.ends[request]:
            assert self.plan() or self.deliver()

    def steps_of(self, count: int) -> None:
        for _ in range(count):
            self.step()


def output(prompt: np.ndarray, *spans: tuple[int, int]) -> list[int]:
    """The tokens of a run that is recomputed with each set of weights: (weights, tokens with them)."""
    found: list[int] = []
    for weights, count in spans:
        found += expected_output(np.array([*prompt, *found]), count, weights=weights)
    return found


def test_a_retracted_row_goes_on_as_if_the_new_weights_had_computed_all_of_it() -> None:
    bench, prompt = Rollouts(), prompt_of(21)
    for request in (1, 2):
        bench.submit(request, prompt, max_tokens=12, ignore_eos=True)
    bench.steps_of(6)
    command = bench.update("new")
    bench.finish()
    ((at, _),) = versions(bench.marks[1])
    assert 0 < at < 12
    assert bench.streams[1] == output(prompt, (0, at), (1, 12 - at))
    assert bench.feature.ends[command] == ""
    bench.submit(3, prompt, max_tokens=4, ignore_eos=True)
    bench.finish()
    assert bench.streams[3] == output(prompt, (1, 4))
    assert versions(bench.marks[3]) == [(0, "1")]
    assert bench.cached[3] == 20  # of the new weights' own pages


def keep_then_go_back(bench: Rollouts) -> None:
    """Let a row keep its pages over a change, and then ask for its text with the new weights and with the old ones."""
    prompt = prompt_of(21)
    bench.update("old")
    bench.plan()
    bench.plan()
    assert bench.feature.present.digest == "old"
    bench.submit(0, prompt_of(5, 7), max_tokens=100, ignore_eos=True)  # so that there is always a row with pages
    bench.submit(1, prompt, max_tokens=16, ignore_eos=True)
    for _ in range(12):
        assert bench.plan() or bench.deliver()
    bench.update("new", "keep")
    bench.run_until_end_of(1)
    ((_, first), (at, second)) = versions(bench.marks[1])
    assert (first, second) == ("1", "2")
    tokens = np.array([*prompt, *bench.streams[1]])
    tags = np.array([VOCAB] * (len(prompt) + at - 1) + [2 * VOCAB] * (16 - at))
    for place in range(at, 15):
        end = len(prompt) + place
        assert tokens[end] == next_token((tokens + np.resize(tags, len(tokens)))[:end]), f"token {place}"
    for number, digest in ((2, "new"), (3, "old")):
        if bench.feature.present.digest != digest:
            command = bench.update(digest, "keep")
            while command not in bench.feature.ends:
                assert bench.plan() or bench.deliver()
        bench.submit(10 + number, tokens, max_tokens=3, ignore_eos=True)
        bench.run_until_end_of(10 + number)
        assert bench.streams[10 + number] == output(tokens, (bench.tag(digest), 3)), f"stale pages with {digest}"


def test_a_row_that_keeps_its_pages_shares_none_that_two_sets_of_weights_have_computed() -> None:
    keep_then_go_back(Rollouts())


def no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightsPlanner, "_name_weights", lambda self, sequence: None)


def no_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageManager, "seal", lambda self, row: None)


def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollouts, "switches", property(lambda self: False, lambda self, value: None), raising=False)


def late_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeDevice.run

    def late(device: FakeDevice, step: Step) -> None:
        present, device.weights = device.weights, getattr(device, "before", device.weights)
        run(device, step)
        device.weights = device.before = present  # type: ignore[attr-defined]

    monkeypatch.setattr(FakeDevice, "run", late)


def no_bump(monkeypatch: pytest.MonkeyPatch) -> None:
    switched = WeightsPlanner._switched

    def forgets(planner: WeightsPlanner) -> None:
        present = planner.present
        switched(planner)
        if planner.present.digest == "new":
            planner.present = present

    monkeypatch.setattr(WeightsPlanner, "_switched", forgets)


@pytest.mark.parametrize("mutant", [no_version, no_bump, no_seal, no_switch, late_by_a_step])
def test_the_scene_notices_a_mutant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        keep_then_go_back(Rollouts())


def test_running_rows_may_finish_first_and_others_wait() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    bench.update("new", "finish")
    bench.plan()
    bench.submit(2, prompt, max_tokens=8, ignore_eos=True)
    bench.finish()
    assert bench.streams[1] == output(prompt, (0, 8))
    assert bench.streams[2] == output(prompt, (1, 8))
    assert bench.marks.get(1, b"") == b""


def finish_without_pages(bench: Rollouts) -> None:
    """Let rows finish that lose their pages meanwhile, while another request waits in front of them."""
    bench.expect_short_outputs()
    prompts = {request: prompt_of(8, request) for request in (1, 2, 3)}
    for request in (1, 2):
        bench.submit(request, prompts[request], max_tokens=40, ignore_eos=True)
    bench.steps_of(4)
    command = bench.update("new", "finish")
    bench.plan()  # and the ranks have read them
    bench.submit(3, prompts[3], max_tokens=8, ignore_eos=True, priority=-1)
    bench.finish()
    assert bench.planner.requests.meter.num_retractions > 0, "pages were not scarce"
    for request in (1, 2):
        assert bench.streams[request] == output(prompts[request], (0, 40)), f"request {request} has two versions"
        assert bench.marks.get(request, b"") == b""
    assert bench.streams[3] == output(prompts[3], (1, 8))
    assert bench.feature.ends[command] == ""


def test_rows_that_finish_do_so_with_their_weights_though_they_lose_their_pages() -> None:
    finish_without_pages(Rollouts(num_pages=20))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("_finishing", property(lambda self: False)), ("hold", lambda self, sequence: None)],
    ids=["forgets those that lost their rows", "lets others start"],
)
def test_the_scene_without_pages_notices_a_mutant(name: str, mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightsPlanner, name, mutant)
    with pytest.raises(AssertionError):
        finish_without_pages(Rollouts(num_pages=20))


def test_rows_finish_with_their_weights_though_executors_are_lost() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    bench.update("new", "finish")
    bench.plan()
    bench.lose()
    bench.plan()
    bench.submit(2, prompt, max_tokens=8, ignore_eos=True)
    bench.finish()
    assert bench.streams[1] == output(prompt, (0, 8))
    assert bench.streams[2] == output(prompt, (1, 8))


def release_and_regain(bench: Rollouts, *tags: Tag) -> None:
    """Give memory back under two rows, with cached pages behind them, and take it again."""
    prompt = prompt_of(21)
    for request in (1, 2):
        bench.submit(request, prompt, max_tokens=12, ignore_eos=True)
    bench.steps_of(4)
    command = bench.command(GiveBack(tags))
    bench.submit(3, prompt, max_tokens=4, ignore_eos=True)
    while bench.plan() or bench.deliver():
        pass
    assert bench.feature.ends[command] == ""
    assert bench.feature.given_back == {*tags}
    assert len(bench.streams[1]) < 12
    for tag in sorted(tags):
        assert not bench.plan(), "a step without memory"
        command = bench.command(TakeBack((tag,)))
        bench.plan()
        bench.plan()
        assert bench.feature.ends[command] == ""
    bench.finish()
    assert bench.streams[1] == bench.streams[2] == output(prompt, (0, 12))
    assert bench.streams[3] == output(prompt, (0, 4))
    assert bench.marks.get(1, b"") == b""


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), ("weights", "kv_cache")], ids=str)
def test_memory_that_is_given_back_is_used_by_no_step(tags: tuple[Tag, ...]) -> None:
    release_and_regain(Rollouts(), *tags)


class Lost(PlannerFeature):
    """A feature that counts how often nothing is cached any more, as leases of sessions do."""

    def __init__(self, parts: PlannerParts) -> None:
        self.count = 0

    def pages_lost(self) -> None:
        self.count += 1


@pytest.mark.parametrize(("mode", "count"), [("retract", 1), ("keep", 0)])
def test_leases_on_pages_of_old_weights_end_with_these(mode: Mode, count: int) -> None:
    bench = Rollouts(more_features=[Lost])
    (lost,) = (one for one in bench.planner.features.all if isinstance(one, Lost))
    bench.submit(1, prompt_of(9), max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    bench.update("new", mode)
    bench.finish()
    assert lost.count == count  # rows that keep their pages keep the cache, and so what leases count


@pytest.mark.parametrize("mutant", ["_forget_pages", "_leave_rows"])
def test_the_scene_of_memory_notices_a_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightsPlanner, mutant, lambda self, *arguments: None)
    with pytest.raises(AssertionError):
        release_and_regain(Rollouts(), "kv_cache")


def test_an_update_takes_the_memory_of_weights_again() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.command(GiveBack(("weights", "kv_cache")))
    bench.plan()
    command = bench.update("new")
    bench.submit(1, prompt, max_tokens=4, ignore_eos=True)
    while bench.plan() or bench.deliver():
        pass
    assert bench.feature.ends[command] == ""
    assert bench.feature.given_back == {"kv_cache"}
    bench.command(TakeBack(("kv_cache",)))
    bench.finish()
    assert bench.streams[1] == output(prompt, (1, 4))


def test_new_ranks_give_back_what_those_before_them_had_given_back() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.command(GiveBack(("kv_cache",)))
    bench.submit(1, prompt, max_tokens=4, ignore_eos=True)
    bench.plan()
    bench.lose()
    bench.asked.clear()
    bench.plan()
    assert bench.asked == [FreeMemory(("kv_cache",))]
    bench.command(TakeBack(("kv_cache",)))
    bench.finish()
    assert bench.streams[1] == output(prompt, (0, 4))


def test_memory_that_a_rank_cannot_give_back_or_take_again_is_an_error() -> None:
    bench, prompt = Rollouts(num_ranks=2), prompt_of(9)
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(2)
    bench.refuses[1] = "it stays"
    command = bench.command(GiveBack(("kv_cache",)))
    bench.finish()
    assert bench.feature.ends[command] == "it stays"
    assert bench.streams[1] == output(prompt, (0, 8))
    bench.refuses.clear()
    bench.command(GiveBack(("weights",)))
    bench.plan()
    bench.refuses[1] = "no room"
    command = bench.command(TakeBack(("weights",)))
    bench.plan()
    assert (bench.feature.ends[command], bench.feature.given_back) == ("no room", {"weights"})
    bench.refuses.clear()
    second = bench.command(TakeBack(("weights",)))
    assert bench.feature.ends[bench.command(GiveBack(("kv_cache",)))] != ""
    bench.plan()
    bench.plan()
    assert (bench.feature.ends[second], bench.feature.given_back) == ("", frozenset())


@pytest.mark.parametrize("mode", ["finish", "keep", "retract"])
def test_a_pause_holds_rows_until_it_is_over(mode: Mode) -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    command = bench.command(Pause(mode))
    bench.submit(2, prompt, max_tokens=8, ignore_eos=True)
    while bench.plan() or bench.deliver():
        pass
    assert bench.feature.ends[command] == ""
    assert len(bench.streams[1]) == (8 if mode == "finish" else 3)
    assert bench.streams[2] == []
    assert bench.planner.table.running.sum() == (1 if mode == "keep" else 0)
    bench.command(Resume())
    bench.finish()
    assert bench.streams[1] == bench.streams[2] == output(prompt, (0, 8))


def test_an_update_during_a_pause_that_aborts_leaves_requests_that_came_later() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    bench.command(Pause("abort"))
    while bench.plan() or bench.deliver():
        pass
    bench.submit(2, prompt, max_tokens=8, ignore_eos=True)
    command = bench.update("new")
    while bench.plan() or bench.deliver():
        pass
    assert bench.feature.ends[command] == ""
    bench.command(Resume())
    bench.finish()
    assert bench.ends == {1: [Finish.ABORT], 2: [Finish.LENGTH]}
    assert bench.streams[2] == output(prompt, (1, 8))


def test_a_pause_takes_the_place_of_one_that_is_not_reached() -> None:
    bench = Rollouts()
    bench.submit(1, prompt_of(9), max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    first, second = bench.command(Pause("finish")), bench.command(Pause("keep"))
    while bench.plan() or bench.deliver():
        pass
    assert bench.feature.ends == {first: "another pause took its place", second: ""}


def test_a_pause_ends_at_once_where_nothing_runs() -> None:
    bench = Rollouts()
    bench.submit(1, prompt_of(9), max_tokens=8, ignore_eos=True)
    assert bench.feature.ends[bench.command(Pause("keep"))] == ""
    assert not bench.plan()
    assert bench.feature.ends[bench.command(Pause("abort"))] == ""
    bench.read()
    assert bench.ends[1] == [Finish.ABORT]


def test_a_pause_ends_when_executors_are_lost() -> None:
    bench = Rollouts()
    bench.submit(1, prompt_of(9), max_tokens=8, ignore_eos=True)
    bench.steps_of(2)
    bench.planner.next_step()
    command = bench.command(Pause("keep"))
    assert command not in bench.feature.ends
    bench.lose()
    assert bench.feature.ends[command] == ""


def test_one_rank_that_cannot_read_leaves_all_as_they_were() -> None:
    bench, prompt = Rollouts(num_ranks=2), prompt_of(9)
    bench.refuses = {1: "no such file"}
    bench.submit(1, prompt, max_tokens=8, ignore_eos=True)
    bench.steps_of(2)
    command = bench.update("new")
    bench.finish()
    assert bench.feature.ends[command] == "no such file"
    assert isinstance(bench.asked[-1], Drop)
    assert bench.streams[1] == output(prompt, (0, 8))
    assert bench.feature.present == Weights()


def test_new_ranks_read_the_present_weights_before_their_first_step() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=12, ignore_eos=True)
    bench.update("new")
    bench.steps_of(5)
    bench.lose()
    bench.finish()
    assert [type(one) for one in bench.asked] == [LoadWeights, Switch] * 2
    assert bench.device.weights == 1
    ((at, _),) = versions(bench.marks[1])
    assert bench.streams[1] == output(prompt, (0, at), (1, 12 - at))


def test_an_update_survives_the_loss_of_ranks_that_read_it() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=12, ignore_eos=True)
    bench.steps_of(2)
    command = bench.update("new")
    bench.planner.next_step()
    bench.planner.outgoing()
    bench.lose()
    bench.finish()
    assert bench.feature.ends[command] == ""
    ((at, _),) = versions(bench.marks[1])
    assert bench.streams[1] == output(prompt, (0, at), (1, 12 - at))


@pytest.mark.parametrize(("mode", "most"), [("abort", 0), ("retract", 1), ("finish", 0)])
def test_an_update_that_meets_lost_ranks_keeps_its_mode_and_its_limit(mode: Mode, most: int) -> None:
    bench = Rollouts()
    bench.update("old")
    bench.plan()
    bench.plan()
    bench.submit(1, prompt_of(9), max_tokens=12, ignore_eos=True)
    bench.steps_of(5)
    command = bench.command(Update(Weights(0, "", "/new", "new"), mode, most))
    bench.planner.next_step()
    bench.planner.outgoing()
    bench.lose()
    while bench.plan() or bench.deliver():
        pass
    bench.read()
    assert bench.feature.ends[command] == ""
    assert [one.weights.digest for one in bench.asked if isinstance(one, LoadWeights)] == ["old", "old", "new"]
    assert bench.ends[1] == [Finish.LENGTH if mode == "finish" else Finish.ABORT]
    assert versions(bench.marks[1]) == [(0, "1")]


def test_ranks_that_stay_and_have_changed_before_they_answered_go_back() -> None:
    bench, prompt = Rollouts(), prompt_of(9)
    bench.submit(1, prompt, max_tokens=12, ignore_eos=True)
    bench.steps_of(2)
    bench.loses_answers = True
    command = bench.update("new")
    while bench.device.weights != 1:
        assert bench.plan() or bench.deliver()
    bench.planner.restart(is_fault=False)  # and the device stays, as with a light sleep
    bench.loses_answers = False
    bench.finish()
    assert bench.feature.ends[command] == ""
    assert [one.number for one in bench.asked if isinstance(one, Switch)] == [1, 0, 1]
    ((at, _),) = versions(bench.marks[1])
    assert bench.streams[1] == output(prompt, (0, at), (1, 12 - at))


def test_a_second_update_is_refused_while_one_is_under_way() -> None:
    bench = Rollouts()
    bench.update("new")
    assert "under way" in bench.feature.ends[bench.update("other")]


def test_requests_end_with_what_they_have() -> None:
    bench = Rollouts(max_running=1)
    for request in (1, 2):
        bench.submit(request, prompt_of(9), max_tokens=8, ignore_eos=True)
    bench.steps_of(3)
    bench.command(Pause("abort"))
    while bench.plan() or bench.deliver():
        pass
    bench.read()
    assert bench.ends == {1: [Finish.ABORT], 2: [Finish.ABORT]}
    assert bench.streams[1] == output(prompt_of(9), (0, 3))


def test_requests_end_that_would_have_tokens_of_too_many_versions() -> None:
    bench = Rollouts()
    bench.submit(1, prompt_of(9), max_tokens=30, ignore_eos=True)
    bench.steps_of(3)
    for digest in ("second", "third"):
        command = bench.command(Update(Weights(0, "", f"/{digest}", digest), None, 2))
        while command not in bench.feature.ends:
            assert bench.plan() or bench.deliver()
        bench.submit(2 if digest == "second" else 3, prompt_of(5), max_tokens=20, ignore_eos=True)
        for _ in range(8):
            assert bench.plan() or bench.deliver()
    bench.finish()
    assert bench.ends == {1: [Finish.ABORT], 2: [Finish.LENGTH], 3: [Finish.LENGTH]}
    assert len(versions(bench.marks[1])) == 1
    assert versions(bench.marks[2])[0][0] == 0
    assert len(versions(bench.marks[2])) == 2
