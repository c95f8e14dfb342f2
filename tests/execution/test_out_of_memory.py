"""The runner and a device that has no room: what it says, and that the step can be launched again in parts."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.batch import Batch, Int32, Int64
from engine.execution.captured_steps import Decoded
from engine.execution.compiled_decodes import CompiledDecodes
from engine.execution.host_rows import HostRows
from engine.execution.rows import DeviceRows, StepInputs
from engine.models.decoder import Decoder
from engine.sampling.captured import SamplingVariant
from engine.types.errors import EngineDied
from engine.types.params import SamplingParams
from tests.models.checkpoints import build, random_tokens, save
from tests.sampling.borders import clear_of_borders


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=5, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=6, frequency_penalty=0.7, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=1.1),
]


async def answers(checkpoint: Path, overlap: int, num_ranks: int = 1) -> list:
    sections = {
        "model": {"path": str(checkpoint), "tokenizer": "none"},
        "device": {"tensor_parallel": num_ranks, "threads": 1},
        "kv": {"num_pages": 64},
        "scheduler": {"overlap_depth": overlap},
        "placement": {"max_restarts": 0},
    }
    system = System(build_config(Config(), sections))
    await system.start()
    streams = [system.ingress.open(random_tokens(15 + 9 * index, index), params) for index, params in enumerate(PARAMS)]
    try:
        return [(delta.token_ids, delta.logprobs) for delta in [await stream.collect() for stream in streams]]
    finally:
        await system.stop()


@pytest.mark.reliability("P11", "no room on the device, from some step on, in prefills, in decodes, down to one token")
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("most", [50, 7, 1])
async def test_tokens_and_log_probabilities_are_those_of_a_device_with_room(
    checkpoint: Path, most: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clear_of_borders():
        expected = await answers(checkpoint, overlap)
    forward = Decoder.forward
    num_failed = 0

    def tight(self: Decoder, step: object) -> torch.Tensor:
        nonlocal num_failed
        if len(step.token_ids_T) > most:  # type: ignore[attr-defined]
            num_failed += 1
            forward(self, step)  # K/V are written, and then there is no room for something else
            raise torch.OutOfMemoryError("planted")
        return forward(self, step)

    monkeypatch.setattr(Decoder, "forward", tight)
    got = await answers(checkpoint, overlap)
    assert 0 < num_failed < 8
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, want) in zip(got, expected, strict=True):
        assert [one.sampled.token_id for one in logprobs] == [one.sampled.token_id for one in want]
        assert [one.sampled.logprob for one in logprobs] == pytest.approx(
            [one.sampled.logprob for one in want], abs=1e-4
        )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
async def test_decode_steps_that_have_no_room_are_launched_again_from_where_they_began(
    checkpoint: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with clear_of_borders():
        expected = await answers(checkpoint, 2)
    run, run_whole, failed = DeviceRows.inputs, CompiledDecodes.launch, []

    def fail(num_rows: int) -> None:
        if num_rows == len(PARAMS) and not failed:
            failed.append(num_rows)
            raise error("planted")

    def full(self: DeviceRows, batch: Batch) -> StepInputs:
        fail(batch.num_decodes if batch.num_decodes == len(batch.positions_T) else 0)
        return run(self, batch)

    def full_whole(self: CompiledDecodes, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        decoded = run_whole(self, rows_N, lengths_N, variant)  # what it has written is written again
        fail(len(rows_N))
        return decoded

    monkeypatch.setattr(HostRows, "inputs", full)
    monkeypatch.setattr(CompiledDecodes, "launch", full_whole)
    got = await answers(checkpoint, 2)
    assert failed
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


class Allocations(TorchDispatchMode):
    """operations: those that made a tensor with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                self.operations.append(str(func))
        return results


def test_what_follows_the_count_of_tokens_and_what_follows_a_failure_take_no_memory_of_the_device() -> None:
    rows = DeviceRows(4, 16, 4, torch.device("cpu"))
    lengths_R = rows.keep_lengths()
    write_at_N, token_ids_N = torch.tensor([5, 20, 40]), torch.tensor([7, -1, 9])
    with Allocations() as made:
        rows.write_sampled(write_at_N, token_ids_N)
        rows.restore(np.arange(4, dtype=np.int32))
    assert made.operations == []
    assert rows.tokens_RM.view(-1)[write_at_N].tolist() == [7, 0, 9]
    assert lengths_R.tolist() == rows.computed.tolist() == [0, 1, 2, 3]


async def test_two_ranks_of_which_one_has_no_room_start_again_and_cut_alike(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await answers(checkpoint, 2, num_ranks=2)
    forward = Decoder.forward
    failed = []

    def tight(self: Decoder, step: object) -> torch.Tensor:
        num_tokens = len(step.token_ids_T)  # type: ignore[attr-defined]
        if num_tokens > 25 and threading.current_thread().name == "executor1":
            failed.append(num_tokens)
            raise torch.OutOfMemoryError("planted")  # while the other rank waits for this one
        return forward(self, step)

    monkeypatch.setattr(Decoder, "forward", tight)
    got = await answers(checkpoint, 2, num_ranks=2)
    assert 1 <= len(failed) <= 4, "a limit that has been learnt is kept"
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


@pytest.mark.reliability("P11", "no room for a single token, alone")
async def test_no_room_for_a_single_token_is_a_fault_that_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Decoder, step: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Decoder, "forward", full)
    with pytest.raises(EngineDied, match="executor0 crashed: MemoryError: planted"):
        await answers(checkpoint, 2)
