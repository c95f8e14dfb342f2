"""A runner with a host tier: what comes back gives the same logits, and sizes that cannot be are refused."""

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.needs import Needs
from engine.execution.runner import ModelRunner
from engine.features.host_tier import rank
from engine.features.host_tier.copy_stream import DirectCopies
from engine.features.host_tier.messages import Transfers
from engine.features.host_tier.rank import HostTierRank
from engine.kernels.panels import products
from engine.messages import Admission, Step
from engine.startup import pools
from engine.startup.loading import load_runner
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from tests.features.host_tier.late_copies import LateCopies
from tests.models.checkpoints import build, random_tokens, save

PROMPT_LEN = 40
MAX_LEN = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


def load(checkpoint: Path, **kv: int | str) -> ModelRunner:
    model = {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32", "max_model_len": MAX_LEN}
    config = build_config(Config(), {"model": model, "device": {"kind": "cpu"}, "kv": kv})
    system = System(config)
    return load_runner(system.config, system.spec, system.max_len, system.engine.plugins, rank=0, progress=False)


def host_tier(runner: ModelRunner) -> HostTierRank:
    (found,) = [one for one in runner._features if isinstance(one, HostTierRank)]
    return found


def int32(numbers: Sequence[int] | np.ndarray) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def transfers(
    to_host: Sequence[int], device_pages: Sequence[int] | np.ndarray, host_pages: Sequence[int] | np.ndarray
) -> dict[str, bytes]:
    """A step's part with these copies."""
    pages = {"device_pages": int32(device_pages), "host_pages": int32(host_pages)}
    return Transfers(to_host=int32(to_host), **pages).part()


def logits_of(runner: ModelRunner, steps: list[Step], poison: dict[int, list[int]]) -> list[Tensor]:
    """The logits that each step samples from.  poison: step -> pages of the pool that become NaN before it."""
    logits: list[Tensor] = []
    sample = runner._sampler.sample

    def noting(logits_NV: Tensor, *where: np.ndarray) -> object:
        logits.append(logits_NV.clone())
        return sample(logits_NV, *where)

    runner._sampler.sample = noting
    for step in steps:
        runner._pool.by_page[poison.get(step.step_id, [])] = torch.nan if runner._pool.format.plain else 0xFF
        runner.launch(step).collect()
    return logits


def prefill(step_id: int, row: int, pages: list[int]) -> Step:
    prompt = int32(random_tokens(PROMPT_LEN, seed=row))
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)  # so that logits come to the sampler
    return Step(
        step_id=step_id,
        admissions=(
            Admission(
                row=row,
                token_ids=prompt,
                num_prompt_tokens=PROMPT_LEN,
                num_computed_tokens=0,
                pages=int32(pages),
                params=params,
            ),
        ),
        prefill_rows=int32([row]),
        prefill_starts=int32([0]),
        prefill_lengths=int32([PROMPT_LEN]),
        prefill_samples=int32([1]),
    )


@pytest.mark.parametrize(
    ("page_size", "late", "kv_dtype"), [(1, False, "auto"), (16, False, "int8"), (16, True, "auto")]
)
def test_pages_that_come_back_elsewhere_give_the_same_logits(
    checkpoint: Path, page_size: int, late: bool, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: copies are made when a layer waits for them."""
    copies = LateCopies() if late else DirectCopies()
    monkeypatch.setattr(rank, "copies_on", lambda device: copies)
    width = MAX_LEN // page_size
    before, after, others = np.random.default_rng(0).permutation(3 * width).reshape(3, width).tolist()
    on_host = np.random.default_rng(1).permutation(width)
    whole = PROMPT_LEN // page_size  # the row goes on writing to the page behind them
    stay = [
        prefill(0, 0, before),
        Step(step_id=1, decode_rows=int32([0])),
        prefill(2, 1, others),  # row 0 waits
        Step(step_id=3, decode_rows=int32([1])),
        Step(step_id=4, decode_rows=int32([0, 1])),
        Step(step_id=5, decode_rows=int32([1, 0])),
    ]
    move = list(stay)
    move[2] = msgspec.structs.replace(
        stay[2],
        parts=transfers([1] * whole, before[:whole], on_host[:whole]),
    )
    move[4] = msgspec.structs.replace(
        stay[4],
        parts=transfers([0] * whole, after[:whole], on_host[:whole]),
        table_rows=int32([0] * whole),
        table_indexes=int32(range(whole)),
        table_pages=int32(after[:whole]),
    )
    sizes = {"page_size": page_size, "num_pages": 3 * width, "dtype": kv_dtype}
    expected = logits_of(load(checkpoint, **sizes), stay, poison={})
    runner = load(checkpoint, **sizes, num_host_pages=width)
    in_one_call = products() is not None and kv_dtype == "auto" and not late
    assert (runner._whole_decodes is not None) == in_one_call, "where copies are made at once no layer has to wait"
    logits = logits_of(runner, move, poison={3: before[:whole]})
    assert [torch.equal(*pair) for pair in zip(logits, expected, strict=True)] == [True] * 6
    if isinstance(copies, LateCopies):
        assert copies.num_waits == 3, "each of three layers waits for its own pages; what has left is in nobody's way"


def test_a_captured_step_begins_when_all_pages_have_landed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies()
    monkeypatch.setattr(rank, "copies_on", lambda device: copies)
    runner = load(checkpoint, page_size=16, num_pages=8, num_host_pages=4)

    class Applied(Exception):
        """The captured step has got its plan."""

    def apply(step: Step) -> None:
        assert not runner._pool.data[:, :, 4:].any(), "host pages that were never written are zeros"
        raise Applied

    step = Step(step_id=0, decode_rows=int32([0]), parts=transfers([0] * 4, [4, 5, 6, 7], range(4)))
    whole: Any = host_tier(runner).decodes(SimpleNamespace(apply=apply))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "_whole_for", lambda step: whole)
    runner._pool.data.fill_(1.0)
    runner._pool.data[:, :, 8] = 0  # the dump page
    with pytest.raises(Applied):
        runner.launch(step)


def test_transfers_come_before_everything_else_of_their_step(checkpoint: Path) -> None:
    """The page that a step's new request writes to is the one that the same step saves."""
    pages, on_host = [2, 0, 1, 3], [3, 1, 0, 2]
    runner = load(checkpoint, page_size=16, num_pages=4, num_host_pages=4)
    logits_of(runner, [prefill(0, 0, pages)], poison={})
    saved = runner._pool.data[:, :, pages].clone()
    step = msgspec.structs.replace(prefill(1, 1, pages), parts=transfers([1] * 4, pages, on_host))
    logits_of(runner, [step], poison={})
    assert not torch.equal(runner._pool.data[:, :, pages], saved)
    assert torch.equal(host_tier(runner).pool.read(on_host).movedim(0, 2), saved)


def test_the_size_of_the_host_pool_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, rank.__name__):
        load(checkpoint, page_size=16, num_pages=4, num_host_pages=12)
        runner = load(checkpoint, page_size=16, num_pages=4)
    lines = [record.getMessage() for record in caplog.records if "host_pool" in record.getMessage()]
    # 3 layers x keys and values x 16 tokens x 2 heads x 32 numbers of 4 bytes, 12 times
    assert lines == ["rank 0 host_pool=0.3 MB (12 pages)"]
    assert not any(isinstance(one, HostTierRank) for one in runner._features)


def test_a_host_pool_larger_than_the_memory_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 32 * 4
    monkeypatch.setattr(pools, "host_needs", lambda *_: Needs(7 * page_bytes))
    monkeypatch.setattr(rank, "available_bytes", lambda: (5 + 7 + 100) * page_bytes)
    load(checkpoint, page_size=16, num_pages=4, num_host_pages=90)
    with pytest.raises(ConfigError) as refused:
        load(checkpoint, page_size=16, num_pages=4, num_host_pages=91_000_000)
    message = str(refused.value)
    asked, there = "kv.num_host_pages=91000000: 2236.4 GB of host memory", "0.0 GB are available"
    assert asked in message, message
    assert there in message, message
    assert "lower it to 90 or less" in message, message


def test_memory_that_the_system_then_denies_is_the_same_kind_of_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise MemoryError("it cannot be page-locked: out of memory")

    monkeypatch.setattr(rank, "HostPool", deny)
    with pytest.raises(
        ConfigError, match=r"kv\.num_host_pages=7: .* cannot be allocated \(it cannot be page-locked: out of"
    ):
        load(checkpoint, num_pages=4, num_host_pages=7)
