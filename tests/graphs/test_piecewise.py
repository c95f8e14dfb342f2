"""Captured and compiled prefill gives the eager model's logits, whatever the step looks like, and pads harmlessly.

The schedule is short: 4, 8, 12, 16 tokens.  Every way to cut is tried: the model itself, captured; its split trace,
captured; its split trace, run directly.
"""

import gc
import sys
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from engine.graphs.attention import ATTENTION
from engine.graphs.comm import COLLECTIVE, BreakingComm
from engine.graphs.device import HostDevice
from engine.layers.attention import writer_of
from engine.layers.ordered_comm import OrderedComm
from engine.models.decoder import DecoderLayer
from engine.plugins.comm.local import LocalComm
from engine.plugins.testing.steps import Driver, SampleSequence
from engine.plugins.testing.threads import ThreadComm, on_ranks
from engine.types.errors import GraphError
from tests.graphs.driver import SIZES, KeepingRecorder, PiecewiseDriver
from tests.graphs.recording import RecordingDevice
from tests.models.checkpoints import random_tokens
from tests.models.conftest import Cases
from tests.models.test_tensor_parallel import load_rank

TOLERANCE = 1e-5
VARIANTS = ["qwen3-tied", "llama-biases", "mistral-window", "gemma3", "glm4"]
CUTS = {
    "captured": {},
    "compiled and captured": {"compiler": "eager"},
    "compiled": {"compiler": "eager", "device": HostDevice()},
}


@pytest.fixture(scope="module")
def made():
    """Drivers that have captured already: it takes longer than most tests."""
    return {}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in CUTS])
def drivers(request, cases: Cases, made):
    """Gives (captured driver, plain driver) of a variant, cut in one of the ways; other tests' sequences are there."""

    def of(variant):
        key = (request.param, variant)
        if key not in made:
            made[key] = pair(cases, CUTS[request.param], variant)
        return made[key]

    return of


@pytest.fixture
def driver(cases: Cases, made):
    """The captured model alone."""
    if "alone" not in made:
        made["alone"] = pair(cases, {})
    return made["alone"][0]


def assert_same(got, expected):
    """Relative to the largest logit; a NaN is far from everything."""
    for name in expected:
        assert got[name].shape == expected[name].shape
        if not expected[name].numel():
            continue
        difference = (got[name] - expected[name]).abs().max()
        assert difference <= TOLERANCE * max(1, expected[name].abs().max()), f"{name}: off by {difference}"


def pair(cases, cut, variant="qwen3-tied", capture=True, **changes):
    """(captured driver, plain driver) of one model."""
    driver = PiecewiseDriver(cases[variant].model, num_pages=300, **{**cut, **changes})
    if capture:
        driver.piecewise.capture()
    return driver, Driver(cases[variant].model, page_size=4, num_pages=300)


def both(drivers, batch, rows="last"):
    got, expected = (driver.step(batch, rows) for driver in drivers)
    assert_same(got, expected)
    return got


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_count_around_every_size(drivers, variant):
    """A fresh prompt of each length, then one that continues a cached prefix of 8 tokens, with all rows sampled."""
    drivers = drivers(variant)
    prefix = random_tokens(8, 99)
    both(drivers, {"prefix": prefix})
    for count in range(1, SIZES[-1] + 3):
        both(drivers, {f"fresh{count}": random_tokens(count, count)}, rows="all")
        for driver in drivers:
            cached = driver.sequences["prefix"]
            driver.sequences[f"hit{count}"] = SampleSequence(list(cached.tokens), list(cached.pages))
        both(drivers, {f"hit{count}": random_tokens(count, 50 + count)}, rows="all")


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_decodes_and_mixed_batches(drivers, variant):
    """Prompts in chunks beside decodes; some steps are larger than any size, some sample nothing."""
    drivers = drivers(variant)
    prompts = {name: random_tokens(count, count) for name, count in (("a", 40), ("b", 23), ("c", 61))}
    plan = [
        ({"a": 7}, "none"),
        ({"a": 1, "b": 3}, "last"),
        ({"a": 8, "b": 1, "c": 33}, "last"),
        ({"a": 1, "b": 1, "c": 1}, "last"),
        ({"b": 1, "c": 14}, "all"),
        ({"a": 10, "b": 2}, "last"),
        ({"a": 1, "c": 2}, "none"),
        ({"a": 9, "b": 1, "c": 1}, "last"),
    ]
    done = dict.fromkeys(prompts, 0)
    for counts, rows in plan:
        batch = {name: prompts[name][done[name] : done[name] + count] for name, count in counts.items()}
        both(drivers, batch, rows)
        for name, count in counts.items():
            done[name] += count


@pytest.mark.parametrize("cut", ["captured", "compiled and captured"])
def test_latents(cases: Cases, cut):
    """Results are narrower than queries there.  Of a layer with an MLP: no graph holds experts on a CPU."""
    spec = cases["deepseek-v3"].spec
    shape = structs.replace(spec.shape, layers=spec.shape.layers[:1] * 2)
    model = load_rank(structs.replace(spec, shape=shape), LocalComm(), "dummy")
    driver = PiecewiseDriver(model, sizes=(8,), num_pages=9, **CUTS[cut])
    driver.piecewise.capture()
    drivers = (driver, Driver(model, page_size=4, num_pages=9))
    both(drivers, {"a": random_tokens(5, 1)})
    both(drivers, {"a": random_tokens(1, 2), "b": random_tokens(6, 3)})
    both(drivers, {"a": random_tokens(1, 4), "b": random_tokens(11, 5)})


def test_steps_take_the_next_larger_graphs_and_larger_ones_none(driver):
    parts = driver.plain.attention_spec.num_layers + 1
    assert driver.piecewise.captured == SIZES
    # The largest is captured once for nothing.
    assert [graph.size for graph in driver.device.graphs[::parts]] == [SIZES[-1], *SIZES[::-1]]
    assert len(driver.device.graphs) == parts * (1 + len(SIZES))
    for count, size in ((1, 4), (4, 4), (5, 8), (12, 12), (13, 16), (17, None)):
        driver.device.replays.clear()
        driver.step({f"s{count}": random_tokens(count, count)})
        assert driver.device.replays == ([size] * parts if size else [])


class Watched:
    """An attention backend with a note of how many rows each call got."""

    def __init__(self, backend):
        self.backend, self.rows = backend, []

    def plan_step(self, batch):
        self.backend.plan_step(batch)

    def attend(self, layer, q):
        self.rows.append(len(q))
        return self.backend.attend(layer, q)


def test_padding_reaches_the_dump_page_and_nothing_else(driver, monkeypatch):
    watched = Watched(driver.attention)
    monkeypatch.setattr(driver.breaking, "_write", writer_of(watched))
    driver.step({"b": random_tokens(8, 2)})  # leaves its tokens and results behind the next step's
    driver.pool.data.fill_(torch.nan)
    driver.step({"a": random_tokens(5, 1)})
    assert watched.rows == [8, 8, 8, 5, 5, 5]
    token_ids, positions, slots = driver.piecewise.inputs_3M[:, 5:8].tolist()
    assert (token_ids, positions) == ([0] * 3, [0] * 3)
    assert slots == [driver.pool.dump_page * driver.pool.page_size] * 3
    assert not driver.breaking.out_MNH[5:8].any()
    written = ~driver.pool.data[0, 0, :, :, 0, 0].isnan()
    expected = torch.zeros_like(written).flatten()
    pages = driver.sequences["a"].pages
    expected[[pages[0] * 4, pages[0] * 4 + 1, pages[0] * 4 + 2, pages[0] * 4 + 3, pages[1] * 4, slots[0]]] = True
    assert torch.equal(written.flatten(), expected)


def test_nothing_captured_survives_in_what_comes_after(cases: Cases):
    """Captures write to the dump page only: a pool full of NaN stays full of NaN."""
    driver = PiecewiseDriver(cases["qwen3-tied"].model)
    driver.piecewise.capture()
    assert driver.pool.data[:, :, : driver.pool.num_pages].isnan().all()


def test_nothing_keeps_the_memory_of_a_captured_run(drivers):
    """All that is left of a run is weak, or smaller sizes could not use its memory."""
    driver, _ = drivers("qwen3-tied")
    if driver.device.captures:
        gc.collect()
        assert len(driver.device.memories) > 100
        assert all(memory.died is not None for memory in driver.device.memories.values())


def test_late_captures_give_the_step_its_result(cases: Cases):
    """The largest comes first because a step needs it, the others as they are needed; nothing is captured at start."""
    device = RecordingDevice(descending=False)
    drivers = pair(cases, {}, capture=False, device=device)
    for count in (15, 3, 9, 9, 2, 16):
        both(drivers, {f"s{count}": random_tokens(count, count)}, rows="all")
        both(drivers, {f"s{count}": random_tokens(2, count)}, rows="all")
    assert drivers[0].piecewise.captured == (4, 12, 16)


def test_captures_complete_what_is_missing(cases: Cases):
    device = RecordingDevice(descending=False)
    driver, _ = pair(cases, {}, capture=False, device=device)
    driver.step({"a": random_tokens(16, 1)})
    driver.piecewise.capture()
    assert driver.piecewise.captured == SIZES
    parts = driver.plain.attention_spec.num_layers + 1
    assert [graph.size for graph in device.graphs[::parts]] == [16, 12, 12, 8, 4]


def test_the_progress_bar_tells_sizes_and_memory(cases: Cases, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    PiecewiseDriver(cases["qwen3-tied"].model).piecewise.capture(progress=True)
    shown = capsys.readouterr().err
    assert "capturing steps with prefill: 100%" in shown
    assert "4/4" in shown
    assert "size 4, 0.0 GB used, 1.1 GB free" in shown


# ---- what must not go unnoticed ----------------------------------------------------------------------------------


class Harmless:
    """Attention that a capture would swallow without a complaint."""

    def plan_step(self, batch):
        pass

    def attend(self, layer, q):
        return q * 1


def test_attention_that_was_captured_is_an_error(cases: Cases):
    model = cases["qwen3-tied"].model
    driver = PiecewiseDriver(model, hidden=lambda step: model.hidden(replace(step, attention=Harmless())))
    with pytest.raises(GraphError, match="broken at 0 attention calls, the model has 3 layers"):
        driver.piecewise.capture()
    assert driver.piecewise.captured == ()


def test_attention_refuses_to_run_inside_a_capture(driver):
    q = driver.device.buffer((4, 4, 32), torch.float32)
    with torch.inference_mode(), driver.device.stream():
        driver.device.begin_capture(driver.device.pools[0], 4)
        with pytest.raises(GraphError, match="attention of layer 1 was about to be captured"):
            driver.breaking.attend(1, q)
        driver.device.abandon()


def test_a_model_that_reads_values_on_the_host_cannot_be_captured(cases: Cases, monkeypatch):
    finish = DecoderLayer.finish

    def peeking(self, *args):
        x = finish(self, *args)
        return x.mul_(x.sum().item())

    monkeypatch.setattr(DecoderLayer, "finish", peeking)
    with pytest.raises(
        GraphError, match=r"graphs of steps with prefill cannot be captured .*host.*lower graphs.max_tokens \(now 16\)"
    ):
        PiecewiseDriver(cases["qwen3-tied"].model).piecewise.capture()


@pytest.mark.parametrize("where", ["captured", "attention"])
def test_after_a_failed_capture_everything_works(cases: Cases, monkeypatch, where):
    drivers = pair(cases, {}, capture=False)
    driver = drivers[0]

    def fail(*_):
        if driver.recorder.recording and len(driver.device.graphs) > 5:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        holder = DecoderLayer if where == "captured" else type(driver.attention)
        name = "finish" if where == "captured" else "attend"
        working = getattr(holder, name)
        patched.setattr(holder, name, lambda *args: (fail(), working(*args))[1])
        with pytest.raises(GraphError, match="RuntimeError: out of memory"):
            driver.piecewise.capture()
    assert driver.piecewise.captured == ()
    assert gc.isenabled()
    assert not driver.device.is_capturing()
    driver.device.graphs.clear()
    driver.piecewise.capture()
    for count in (3, 8, 13):
        both(drivers, {f"s{count}": random_tokens(count, count)})


@pytest.mark.slow
def test_garbage_is_frozen_while_graphs_are_captured(cases: Cases, monkeypatch):
    gc.unfreeze()
    seen = []
    finish = DecoderLayer.finish
    driver = PiecewiseDriver(cases["qwen3-tied"].model)

    def watching(self, *args):
        seen.append((driver.recorder.recording, gc.isenabled(), gc.get_freeze_count() > 0))
        return finish(self, *args)

    monkeypatch.setattr(DecoderLayer, "finish", watching)
    driver.piecewise.capture()
    assert set(seen) == {(False, True, False), (True, False, True)}  # warming up, capturing
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


# ---- several ranks -----------------------------------------------------------------------------------------------


# One collective for the embedding and two for each layer; with sums in one order each layer gathers four times.
@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "ordered", "breaks"), [(None, False, 7), ("eager", False, 7), (None, True, 13)])
def test_ranks_break_at_collectives_that_cannot_be_captured(cases: Cases, compiler, ordered, breaks):
    case = cases["qwen3-yarn-bias"]
    counts = (3, 8, 9, 16, 17)
    expected = Driver(case.model, page_size=4, num_pages=300)
    whole = [expected.step({f"s{count}": random_tokens(count, count)})[f"s{count}"] for count in counts]

    def work(comm: ThreadComm):
        device = RecordingDevice()
        recorder = KeepingRecorder(device, device.pool())
        breaking = BreakingComm(comm, recorder)
        model = load_rank(case.spec, OrderedComm(breaking) if ordered else breaking)
        driver = PiecewiseDriver(model, device=device, recorder=recorder, comm=breaking, compiler=compiler)
        driver.piecewise.capture()
        assert recorder.recordings[-1].breaks == {ATTENTION: 3, COLLECTIVE: breaks}
        return [driver.step({f"s{count}": random_tokens(count, count)})[f"s{count}"] for count in counts]

    for logits in on_ranks(2, work):
        for got, one in zip(logits, whole, strict=True):
            assert (got - one).abs().max() <= 1e-4


class Twin:
    """The first of two ranks that compute the same, with collectives that a capture can hold."""

    rank, size, capturable = 0, 2, True

    def all_reduce(self, tensor):
        return tensor.mul_(2)

    def all_gather(self, tensor, dim=-1):
        return torch.cat((tensor, tensor), dim)

    def close(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "eager"])
def test_collectives_that_can_be_captured_are(cases: Cases, compiler):
    device = RecordingDevice()
    recorder = KeepingRecorder(device, device.pool())
    comm = BreakingComm(Twin(), recorder)
    model = load_rank(cases["qwen3-yarn-bias"].spec, comm)
    driver = PiecewiseDriver(model, device=device, recorder=recorder, comm=comm, compiler=compiler)
    driver.piecewise.capture()
    assert recorder.recordings[-1].breaks == {ATTENTION: 3}
    both((driver, Driver(model, page_size=4)), {"a": random_tokens(7, 1)}, rows="all")


class Pessimist:
    """The other of two ranks has failed."""

    rank, size = 0, 2

    def all_reduce(self, tensor):
        return tensor

    def all_gather(self, tensor, dim=-1):
        return tensor

    def close(self):
        pass


def test_if_one_rank_cannot_capture_none_does(cases: Cases):
    driver = PiecewiseDriver(cases["qwen3-tied"].model, comm=Pessimist())
    with pytest.raises(GraphError, match="another rank failed"):
        driver.piecewise.capture()
    assert driver.piecewise.captured == ()
