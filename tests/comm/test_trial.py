"""The trial of shared memory in processes of their own: what they compute, how they end, and what ranks agree on."""

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import Config, build_config
from engine.host.interpreters import import_path, module_command
from engine.host.kept_results import KeptResults
from engine.plugins.comm.symmetric import SymmetricComm
from engine.plugins.comm.symmetric.memory import ALIGNMENT, Limits, SharedMemory
from engine.plugins.comm.symmetric.trial import PROCESS, MemoryTrial, new_trial
from engine.plugins.comm.symmetric.trial_process import check_memory, numbers, sizes_tried
from engine.plugins.comm.torch import TorchComm, TorchCommOptions
from engine.plugins.hookspecs import CommContext
from engine.plugins.kinds import chosen_plugins
from engine.plugins.manager import Plugins
from engine.startup.loading import comm_name
from tests.comm.groups import at_once

SIZES = (64, 256, 1024)
LIMITS = Limits(256, 1024, 4096)
Spoil = Callable[["ThreadSums", Tensor], Tensor]


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptResults[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KeptResults("shared memory", "a test", (), str)


# ---- how the process ends


def test_a_process_that_ends_well_is_right_and_may_be_kept(kept: KeptResults[str]) -> None:
    trial = MemoryTrial(program(""), 30, kept)
    assert trial.known is None
    trial.run()
    assert MemoryTrial(program(""), 30, kept).known is None, "only all ranks together know that it was right"
    for problem in ("", "it was not done after 60 s"):
        trial.keep(problem)
        assert MemoryTrial(program(""), 30, kept).known == problem


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import sys; sys.stderr.write('a warning\\n'); raise ValueError('no peer access')",
            "ValueError: no peer access",
        ),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ],
    ids=["an error", "a status", "abort", "a bad address"],
)
def test_a_process_that_fails_or_dies_has_its_reason(kept: KeptResults[str], code: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        MemoryTrial(program(code), 30, kept).run()


def test_a_process_that_hangs_is_killed_with_all_that_it_started(kept: KeptResults[str], tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    writes = f"import time, pathlib\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {writes!r}])\ntime.sleep(600)"
    )
    with pytest.raises(RuntimeError, match=r"was not done after 1 s"):
        MemoryTrial(program(code), 1, kept).run()
    mark.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not mark.exists()


@pytest.mark.slow
def test_a_process_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    """Else it would hold memory of its GPU when the rank is started again."""
    mark = tmp_path / "alive"
    trial = (
        f"import os, pathlib, threading, time\nfrom {PROCESS} import end_with_starter\n"
        "threading.Thread(target=end_with_starter, args=(0,)).start()\n"
        f"while True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    )
    rank = subprocess.Popen(
        program(
            "from engine.host.kept_results import KeptResults\n"
            "from engine.plugins.comm.symmetric.trial import MemoryTrial\n"
            f"MemoryTrial({program(trial)!r}, 60, KeptResults('shared memory', 'a test', (), str)).run()"
        ),
        env={**os.environ, **import_path(), "XDG_CACHE_HOME": str(tmp_path)},
    )
    deadline = time.monotonic() + 120
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mark.exists()
    rank.kill()
    rank.wait()
    time.sleep(1)
    mark.unlink()
    time.sleep(0.5)
    assert not mark.exists()


class StuckProcess:
    """A process that a driver holds, so that a kill does not end it."""

    pid = 1 << 30  # of no process
    stderr = io.BytesIO()

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def communicate(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("trial", timeout)

    def wait(self, timeout: float | None = None) -> None:
        assert timeout is not None, "it waits for ever"
        raise subprocess.TimeoutExpired("trial", timeout)


def test_a_process_that_even_a_kill_does_not_end_is_left(
    kept: KeptResults[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", StuckProcess)
    with pytest.raises(RuntimeError, match=r"was not done after 1 s"):
        MemoryTrial(program(""), 1, kept).run()


@pytest.mark.slow
def test_the_real_process_fails_with_a_reason_where_torch_has_no_gpu(kept: KeptResults[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = module_command(PROCESS, "0", "2", "0", f"file://{tmp_path}/ranks.trial", "1024", "4096", "0", "60")
    with pytest.raises(RuntimeError, match=r"failed: .*(CUDA|NVIDIA|cuda)"):
        MemoryTrial(command, 60, kept).run()


# ---- what the process computes


class ThreadSums:
    """Memory that threads share, with the sums of a rank alone.  spoil: what a mistake makes of a sum."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier, spoil: Spoil) -> None:
        self.rank, self.parts, self.turns = rank, parts, 0
        self._barrier, self._spoil = barrier, spoil

    def total(self, part: Tensor) -> Tensor:
        self.parts[self.rank] = part.clone()
        self._barrier.wait(60)
        summed = self._spoil(self, torch.stack(self.parts).sum(0))
        self._barrier.wait(60)
        self.turns += 1
        return summed

    def sum_into(self, tensor: Tensor) -> None:
        tensor.copy_(self.total(tensor))

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD += self.total(part_TD)
        return torch.nn.functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


class WithoutNorms(ThreadSums):
    """Memory whose kernel does not take these rows."""

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> None:  # type: ignore[override]
        return None


class WrongNorms(ThreadSums):
    """Memory whose norm is of the sum without the residual stream."""

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        summed = self.total(part_TD)
        x_TD += summed
        return torch.nn.functional.rms_norm(summed, weight_D.shape, weight_D, eps)


def check(spoil: Spoil, kind: type[ThreadSums] = ThreadSums, size: int = 3) -> None:
    parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    memories: list[SharedMemory] = [kind(rank, parts, barrier, spoil) for rank in range(size)]

    def rank_check(rank: int) -> None:
        try:
            check_memory(memories[rank], rank, size, "cpu", SIZES)
        except AssertionError:
            barrier.abort()
            raise

    try:
        at_once(size, rank_check)
    except threading.BrokenBarrierError:
        raise AssertionError("another rank found it") from None


def test_right_sums_are_right() -> None:
    check(lambda memory, total: total)
    check(lambda memory, total: total, WithoutNorms)
    check(lambda memory, total: total, size=8)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda memory, total: total - memory.parts[2],
        lambda memory, total: memory.parts[memory.rank],
        lambda memory, total: total + (memory.rank == 1),
        lambda memory, total: total.flatten().roll(1).view(total.shape),
        lambda memory, total: torch.cat([total.flatten()[:-1], total.flatten()[-1:] + 1]).view(total.shape),
        lambda memory, total: total + (memory.turns % 3 == 2),
    ],
    ids=["a rank is left out", "nothing is summed", "one rank differs", "shifted", "the last number", "a later turn"],
)
def test_every_mistake_is_found(spoil: Spoil) -> None:
    with pytest.raises(AssertionError, match=r"is wrong|another rank found it"):
        check(spoil)


def test_a_wrong_norm_is_found() -> None:
    with pytest.raises(AssertionError, match=r"a norm in torch.float32 is off by|another rank found it"):
        check(lambda memory, total: total, WrongNorms)


def test_a_rank_knows_the_numbers_of_all_and_they_differ() -> None:
    like = torch.empty(64, dtype=torch.bfloat16)
    made = [numbers(like, rank, turn) for rank in range(8) for turn in range(3)]
    assert all(not torch.equal(one, other) for at, one in enumerate(made) for other in made[:at])
    assert max(one.max().item() for one in made) * 8 + 1 <= 256, "sums of 8 ranks are exact in bfloat16"


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        (Limits(256 << 10, 8 << 20), 8),
        (Limits(0, 4096), 2),
        (Limits(4096, 4096), 3),
        (Limits(256 << 10, 8 << 20, 32 << 20), 8),
    ],
    ids=str,
)
def test_every_way_and_its_borders_are_tried(limits: Limits, size: int) -> None:
    found = sizes_tried(limits, size)
    assert all(0 < one <= limits.most and one % (ALIGNMENT * size) == 0 for one in found)
    assert found[-1] > limits.most - ALIGNMENT * size
    if limits.by_switch:
        assert found[0] == limits.two_shot + ALIGNMENT * size, "the other ways have a trial of their own"
        return
    if limits.one_shot:
        assert any(one <= limits.one_shot for one in found)
    if limits.one_shot < limits.two_shot:
        assert any(one > limits.one_shot for one in found)


# ---- what ranks agree on


@dataclass
class KnownTrial:
    """A trial with a known result.  runs: how often it was made."""

    known: str | None = None
    error: str = ""
    runs: int = 0
    kept: str | None = None
    path: str = "the/file.json"

    def run(self) -> None:
        self.runs += 1
        if self.error:
            raise RuntimeError(self.error)

    def keep(self, problem: str) -> None:
        self.kept = problem


@dataclass
class Group:
    """Ranks with trials, and with which limits each allocated memory."""

    url: str
    trials: Sequence[KnownTrial]
    switch_trials: Sequence[KnownTrial | None] = (None, None)
    shares: list[list[Limits]] = field(default_factory=lambda: [[], []])

    def connect(self) -> list[SymmetricComm]:
        size = len(self.trials)
        parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)

        def share(rank: int, limits: Limits) -> SharedMemory:
            self.shares[rank].append(limits)
            return ThreadSums(rank, parts, barrier, lambda memory, total: total)

        def build(rank: int) -> SymmetricComm:
            library = TorchComm(CommContext(rank, size, "cpu", self.url), TorchCommOptions())
            trials: Any = (self.trials[rank], self.switch_trials[rank])
            return SymmetricComm(library, partial(share, rank), LIMITS, "cpu", *trials)

        return at_once(size, build)


def test_memory_is_used_after_every_rank_was_right_and_that_is_kept(tmp_path: Path) -> None:
    group = Group(f"file://{tmp_path}/ranks", [KnownTrial(), KnownTrial(known="")])
    ranks = group.connect()
    assert [one.runs for one in group.trials] == [1, 1], "a rank that knows it runs, too, as others need it"
    assert [one.kept for one in group.trials] == ["", ""]
    assert group.shares == [[LIMITS._replace(by_switch=0)]] * 2
    assert all(rank.norms for rank in ranks)


def test_what_all_ranks_know_is_not_tried_again(tmp_path: Path) -> None:
    group = Group(f"file://{tmp_path}/ranks", [KnownTrial(known=""), KnownTrial(known="")])
    assert all(rank.norms for rank in group.connect())
    assert [one.runs for one in group.trials] == [0, 0]


def test_where_one_trial_fails_no_rank_touches_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = Group(f"file://{tmp_path}/ranks", [KnownTrial(), KnownTrial(error="was ended by SIGSEGV")])
    ranks = group.connect()
    assert group.shares == [[], []]
    assert not any(rank.norms for rank in ranks)
    assert at_once(2, lambda rank: ranks[rank].all_reduce(torch.ones(4)).tolist()) == [[2.0] * 4] * 2
    assert any("goes through NCCL" in one and "was ended by SIGSEGV" in one for one in caplog.messages)
    assert any("another rank's trial was not right" in one for one in caplog.messages)
    assert [one.kept for one in group.trials] == [
        "another rank's trial was not right",
        "RuntimeError: was ended by SIGSEGV",
    ]


def test_what_was_wrong_is_kept_so_that_a_later_start_does_not_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = [KnownTrial(known=""), KnownTrial(known="it was not done after 60 s")]
    group = Group(f"file://{tmp_path}/ranks", known)
    assert not any(rank.norms for rank in group.connect())
    assert [one.runs for one in known] == [0, 0]
    assert any("not done after 60 s; kept from an earlier start in the/file.json" in one for one in caplog.messages)


@pytest.mark.parametrize(
    ("first", "second", "by_switch"),
    [
        (KnownTrial(), KnownTrial(known=""), 4096),
        (KnownTrial(), KnownTrial(error="no multicast"), 0),
        (KnownTrial(known=""), KnownTrial(known="no multicast"), 0),
        (KnownTrial(known=""), None, 0),
    ],
    ids=["right", "wrong on one rank", "known to be wrong", "a rank without"],
)
def test_the_switch_sums_after_a_trial_of_its_own_on_every_rank(
    tmp_path: Path, first: KnownTrial, second: KnownTrial | None, by_switch: int
) -> None:
    group = Group(f"file://{tmp_path}/ranks", [KnownTrial(known="")] * 2, [first, second])
    ranks = group.connect()
    assert group.shares == [[LIMITS._replace(by_switch=by_switch)]] * 2
    assert all(rank.norms for rank in ranks), "the other ways do not depend on it"


@pytest.mark.parametrize(
    ("size", "url", "limit_s"),
    [
        (1, "file:///tmp/ranks", 60),
        (2, "tcp://10.0.0.1:29500", 60),
        (2, "env:///ranks", 60),
        (2, "file:///tmp/ranks", 0),
    ],
    ids=["one rank", "several machines", "torchrun", "switched off"],
)
def test_no_trial_without_ranks_of_one_machine_or_with_a_limit_of_zero(size: int, url: str, limit_s: float) -> None:
    assert new_trial(CommContext(0, size, "cuda", url), LIMITS, limit_s) is None


# ---- what 'auto' is


@pytest.mark.parametrize(
    ("device", "url", "plugins", "expected"),
    [
        ("cuda", "file:///tmp/ranks", {}, "symmetric"),
        ("cuda", "tcp://10.0.0.1:29500", {}, "torch"),
        ("cpu", "file:///tmp/ranks", {}, "torch"),
        ("cuda", "file:///tmp/ranks", {"comm": "torch"}, "torch"),
        ("cuda", "file:///tmp/ranks", {"options": {"comm.torch": {"timeout_s": 60.0}}}, "torch"),
    ],
    ids=["GPUs of one machine", "several machines", "CPUs", "by name", "options of torch"],
)
def test_auto_shares_memory_between_gpus_of_one_machine(
    device: str, url: str, plugins: dict[str, object], expected: str
) -> None:
    config = build_config(Config(), {"device": {"tensor_parallel": 2}, "plugins": plugins})
    loaded = Plugins({"comm": chosen_plugins(config)["comm"]}, config.plugins.options)
    assert comm_name(config, loaded, CommContext(0, 2, device, url)) == f"comm.{expected}"
