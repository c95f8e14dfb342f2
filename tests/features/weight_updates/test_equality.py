"""After an update an engine gives, bit for bit, what one gives that was started with the new weights."""

import contextlib
import gc
import mmap
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from callboard import LLM, SamplingParams
from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.fingerprint import fingerprint
from engine.control.changeover import Changeover
from engine.features.weight_updates import rank
from engine.features.weight_updates.deltas import difference
from engine.features.weight_updates.memory import parts_of, write_tensors
from engine.features.weight_updates.messages import NAME
from engine.features.weight_updates.planner import WeightsPlanner
from engine.features.weight_updates.rank import WeightsRank
from engine.llm import Completion
from engine.types.errors import RequestError, WeightsError
from tests.models.checkpoints import build, random_tokens, save
from tests.workers.executors import send

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [random_tokens(length, length) for length in (3, 40, 17)]
# One row at a time: the products of torch and oneDNN in two runs are then the same calls with the same shapes.
BASE = {
    "kv": {"page_size": 4, "num_pages": 256},
    "device": {"threads": 1},
    "model": {"tokenizer": "none"},
    "scheduler": {"max_running": 1},
}
Sections = dict[str, dict[str, Any]]
Said = list[tuple[list[int], list[float]]]


def checkpoint(folder: Path, variant: str, seed: int, dtype: torch.dtype | None = None) -> Path:
    model = build(variant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return save(model if dtype is None else model.to(dtype), folder / str(seed), sharded=False)


def engine(path: Path, more: Sections) -> LLM:
    sections = {name: {**BASE.get(name, {}), **more.get(name, {})} for name in {*BASE, *more}}
    return LLM(path, config=sections, progress=False)


def said(completions: list[Completion]) -> Said:
    return [(one.token_ids, [token.sampled.logprob for token in one.logprobs]) for one in completions]


def fresh(path: Path, more: Sections) -> Said:
    with engine(path, more) as llm:
        return said(llm.generate(PROMPTS, GREEDY))


def check(folder: Path, variant: str, more: Sections, after: Callable[[LLM], None] | None = None) -> None:
    """Check the law for a model, in both directions.  after: called with the engine after the first update."""
    # Weights in half precision are laid out otherwise than others.
    first, second = checkpoint(folder, variant, 1), checkpoint(folder, variant, 2, torch.bfloat16)
    with engine(first, more) as llm:
        before = said(llm.generate(PROMPTS, GREEDY))
        assert llm.weights.update(second, version="step-2").version == "step-2"
        if after is not None:
            after(llm)
        completions = llm.generate(PROMPTS, GREEDY)
        assert [one.weight_versions for one in completions] == [((0, "step-2"),)] * len(PROMPTS)
        assert [one.usage.cached_tokens for one in completions] == [0] * len(PROMPTS)
        changed = said(completions)
        assert changed != before
        llm.weights.update(first)
        assert said(llm.generate(PROMPTS, GREEDY)) == before
    assert fresh(second, more) == changed


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("qwen3-tied", {}),
        pytest.param("llama", {"model": {"dtype": "bfloat16"}}, marks=pytest.mark.slow),
        pytest.param("llama-biases", {"model": {"quantization": "int8"}}, marks=pytest.mark.slow),
        pytest.param("llama", {"model": {"numerics": "invariant"}}, marks=pytest.mark.slow),
        pytest.param("llama", {"device": {"tensor_parallel": 2}}, marks=pytest.mark.slow),
        pytest.param("deepseek-v2", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        pytest.param("lfm2", {}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"kv": {"num_host_pages": 64}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_gives_the_bits_of_a_fresh_start(variant: str, more: Sections, tmp_path: Path) -> None:
    # ``checkpoint`` saves some models in half precision, and then config.json says so.
    check(tmp_path, variant, {**more, "model": {"dtype": "float32", **more.get("model", {})}})


@pytest.mark.slow
def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    known = fingerprint

    def raced(spec: ModelSpec, load_format: str) -> str:
        digest = known(spec, load_format)
        checkpoint(tmp_path / "next", "llama", 3)
        (tmp_path / "next" / "3" / "model.safetensors").replace(second / "model.safetensors")  # a trainer's next save
        return digest

    with engine(first, {}) as llm:
        before = said(llm.generate(PROMPTS, GREEDY))
        with monkeypatch.context() as patched:
            patched.setattr(rank, "fingerprint", raced)
            with pytest.raises(RequestError, match="have changed since"):
                llm.weights.update(second)
        assert said(llm.generate(PROMPTS, GREEDY)) == before
        assert llm.weights.state.number == 0


@pytest.mark.slow
def test_a_rank_goes_back_to_its_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(planner: WeightsPlanner) -> None:
        assert planner._update is not None
        planner._end(planner._update[0], "the answer is lost")
        planner._update = None

    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    with engine(first, {}) as llm:
        before = said(llm.generate(PROMPTS, GREEDY))
        with monkeypatch.context() as patched:
            patched.setattr(WeightsPlanner, "_switched", lose)
            with pytest.raises(RequestError, match="lost"):
                llm.weights.update(second)
        changeover = Changeover(llm._system, lambda engine: b"")
        llm._await(changeover.sleep(1))
        llm._await(changeover.wake())
        assert said(llm.generate(PROMPTS, GREEDY)) == before


@pytest.mark.slow
def test_slots_of_adapters_stay_around_the_new_weights(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    check(tmp_path, "llama", {"model": {"dtype": "float32"}, "lora": {"folder": str(tmp_path / "adapters")}})


@pytest.mark.slow
def test_an_executor_that_dies_comes_back_with_the_present_weights(tmp_path: Path) -> None:
    def kill(llm: LLM) -> None:
        send(signal.SIGKILL)
        llm.generate([[7] * 9], GREEDY)

    more = {"model": {"dtype": "float32"}, "placement": {"executor": "process"}}
    check(tmp_path, "llama", more, kill)


@pytest.mark.slow
def test_an_output_has_a_mark_where_its_weights_change_and_a_bad_directory_changes_nothing(
    tmp_path: Path,
) -> None:
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    longer = GREEDY.replace(max_tokens=400, logprobs=None)
    with engine(first, {}) as llm:
        found: list[Completion] = []
        llm.weights.pause()
        thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[:1], longer)))
        thread.start()
        while not llm._system.ingress.num_open:
            time.sleep(0.01)
        llm.weights.resume()
        while not (planner := llm._system.scheduler.planner) or not planner.table.running.any():
            time.sleep(0.001)
        llm.weights.update(second)
        thread.join()
        (completion,) = found
        marks = completion.weight_versions
        tail = PROMPTS[0] + completion.token_ids[: marks[0][0]]
        rest = GREEDY.replace(max_tokens=400 - marks[0][0], logprobs=None)
        assert llm.generate([tail], rest)[0].token_ids == completion.token_ids[marks[0][0] :]
        for directory, kind in (
            (tmp_path, WeightsError),
            (checkpoint(tmp_path / "o", "llama-head-dim", 1), RequestError),
        ):
            with pytest.raises(kind):
                llm.weights.update(directory)
        with pytest.raises(RequestError, match="digest"):
            llm.weights.update(first, digest="another")
        assert llm.weights.state.version == "1"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "crash"])
def test_a_pause_ends_with_its_engine(tmp_path: Path, end: str) -> None:
    llm = engine(checkpoint(tmp_path, "llama", 1), {})

    def pause() -> None:
        with contextlib.suppress(RequestError, RuntimeError):  # it is reached where the row was cancelled before
            llm.weights.pause("finish")

    def crash(message: object) -> None:
        raise OverflowError

    def generate() -> None:
        with contextlib.suppress(Exception):
            llm.generate(PROMPTS[:1], GREEDY.replace(max_tokens=400, logprobs=None))

    running = threading.Thread(target=generate)
    running.start()
    while not (planner := llm._system.scheduler.planner) or not planner.table.running.any():
        time.sleep(0.001)
    if end == "crash":
        llm._system.scheduler._planned.complete = crash  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    if end == "close":
        llm.close()
    thread.join(30)
    assert not thread.is_alive()
    llm.close()
    running.join(30)


def test_tensors_of_this_process_give_the_bits_of_their_checkpoint(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, "qwen3-tied", 1), checkpoint(tmp_path, "qwen3-tied", 2)
    new = load_file(second / "model.safetensors")
    expected = fresh(second, {})
    with engine(first, {}) as llm:
        before = said(llm.generate(PROMPTS, GREEDY))
        old = load_file(first / "model.safetensors")
        memory = write_tensors(difference(parts_of(old), parts_of(new)), {"base": llm.weights.state.digest})
        llm.weights.update(new, version="tensors")
        assert said(llm.generate(PROMPTS, GREEDY)) == expected
        with pytest.raises(WeightsError, match="is for weights of digest"):
            llm.weights.update(memory)
        assert said(llm.generate(PROMPTS, GREEDY)) == expected
        llm.weights.update({name: one.numpy() for name, one in old.items()})
        assert said(llm.generate(PROMPTS, GREEDY)) == before


def test_a_trainer_may_remove_weights_that_others_are_to_follow(tmp_path: Path) -> None:
    """An update by pieces, a pause and a state do not read the directory of the present weights."""
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    with engine(first, {}) as llm:
        llm.weights.update(second)
        shutil.rmtree(second)
        llm._await(llm._system.features[NAME].operate('{"type": "BeginUpdate"}'))
        llm._await(llm._system.features[NAME].operate('{"type": "FinishUpdate"}'))
        assert llm.weights.state.number == 1
        with pytest.raises(WeightsError):
            llm.weights.update({"model.norm.weight": torch.ones(64)})
        assert llm.weights.update(first).number == 2


@pytest.mark.slow
def test_an_executor_that_dies_reads_memory_again(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    more = {"placement": {"executor": "process"}}
    expected = fresh(second, more)
    with engine(first, more) as llm:
        llm.weights.update(load_file(second / "model.safetensors"))
        send(signal.SIGKILL)
        assert said(llm.generate(PROMPTS, GREEDY)) == expected


def test_memory_goes_back_to_the_system_by_tags_and_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, ranks = WeightsRank.build, list[WeightsRank]()

    def noted(rank: WeightsRank, *parts: Any) -> None:
        ranks.append(rank)
        build(rank, *parts)

    monkeypatch.setattr(WeightsRank, "build", noted)
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    with engine(first, {"kv": {"num_pages": 100_000}}) as llm:
        expected = said(llm.generate(PROMPTS, GREEDY))
        (rank,) = ranks
        (pool,) = rank._pools
        pool.by_page.fill_(1)
        weight = weakref.ref(rank._context.model.layers[0].before_attention.weight)  # type: ignore[attr-defined]
        resident = resident_bytes()
        assert llm.weights.release("kv_cache").released == ("kv_cache",)
        assert resident - resident_bytes() > 0.9 * pool.by_page.nbytes
        assert pool.by_page.count_nonzero() * pool.by_page.itemsize < 2 * mmap.PAGESIZE  # of its first and last page
        assert llm.weights.release("weights").released == ("kv_cache", "weights")
        gc.collect()
        assert weight() is None, "the weights are still there"
        assert llm.weights.regain().released == ()
        assert said(llm.generate(PROMPTS, GREEDY)) == expected
        llm.weights.release("weights")
        llm.weights.update(second)
        changed = said(llm.generate(PROMPTS, GREEDY))
    assert changed == fresh(second, {})


def test_recurrent_states_go_back_to_the_system_with_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, ranks = WeightsRank.build, list[WeightsRank]()

    def noted(rank: WeightsRank, *parts: Any) -> None:
        ranks.append(rank)
        build(rank, *parts)

    monkeypatch.setattr(WeightsRank, "build", noted)
    first = checkpoint(tmp_path, "qwen3-5", 1)
    with engine(first, {"scheduler": {"max_running": 4}}) as llm:
        expected = said(llm.generate(PROMPTS, GREEDY))
        (rank,) = ranks
        states = rank._context.states
        assert states is not None
        kept = [states.data, *(one for feature in rank._context.features for one in feature.page_memory())]
        assert all(one.count_nonzero() > 3 * mmap.PAGESIZE / 4 for one in kept)
        llm.weights.release("kv_cache")
        assert all(one.count_nonzero() <= 2 * mmap.PAGESIZE / 4 for one in kept)  # of its first and last page
        llm.weights.regain()
        again = llm.generate(PROMPTS, GREEDY)
        assert said(again) == expected
        assert [one.usage.cached_tokens for one in again] == [0] * len(PROMPTS)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_limit_of_versions_may_be_set_once(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, "llama", 1), checkpoint(tmp_path, "llama", 2)
    longer = GREEDY.replace(max_tokens=200, logprobs=None)
    found: list[Completion] = []
    with engine(first, {"scheduler": {"max_running": 1, "max_weight_versions": 1}}) as llm:
        llm.weights.pause()
        thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[:1], longer)))
        thread.start()
        while not llm._system.ingress.num_open:
            time.sleep(0.001)
        llm.weights.resume()
        while not (planner := llm._system.scheduler.planner) or not planner.table.running.any():
            time.sleep(0.001)
        llm.weights.pause("keep")
        llm.weights.update(second)
        llm.weights.resume()
        thread.join()
    assert found[0].finish_reason == "abort"
    assert 0 < len(found[0].token_ids) < 200
