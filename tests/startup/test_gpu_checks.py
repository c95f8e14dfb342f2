"""The self-test of GPUs, on doubles of what it checks: each check finds what is wrong, and stops no other."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.startup import gpu_checks, inventory
from engine.startup.gpu_checks import CheckPlace, CheckResult, check_graphs, check_kernels, main, self_test
from engine.startup.inventory import GPU, Inventory
from server import cli
from tests.graphs.engines import EngineDevice

CPU = CheckPlace(torch.device("cpu"))


class TorchKernels:
    """What kernels compute, in torch.  off: added to each result."""

    def __init__(self, off: float) -> None:
        self.off = off

    def add_norm(self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD += update_TD
        return torch.nn.functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)

    def gated(self, gate_up_T2I: Tensor, kind: str = "silu") -> Tensor:
        gates, through = gate_up_T2I.chunk(2, -1)
        return torch.nn.functional.silu(gates) * through + self.off


def test_kernels_are_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "choose_kernels", lambda device: TorchKernels(0))
    with torch.inference_mode():
        assert check_kernels(CPU).startswith("triton, within")
        monkeypatch.setattr(gpu_checks, "choose_kernels", lambda device: TorchKernels(0.1))
        with pytest.raises(AssertionError, match="triton's results are off by"):
            check_kernels(CPU)


def test_graphs_are_replayed_on_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "device_for_graphs", lambda device: EngineDevice(descending=False))
    with torch.inference_mode():
        assert check_graphs(CPU).startswith("captured and replayed, within")
        monkeypatch.setattr(
            EngineDevice, "end", lambda self, end=EngineDevice.end: (end(self), SimpleNamespace(replay=int))[1]
        )
        with pytest.raises(AssertionError, match="a replay is off by"):
            check_graphs(CPU)


@pytest.mark.slow
def test_all_ranks_of_a_machine_add_and_gather(capfd: pytest.CaptureFixture[str]) -> None:
    main("collectives", "cpu")
    assert (
        capfd.readouterr().out.strip().endswith('{"name":"collectives","right":true,"found":"2 ranks: torch is right"}')
    )


def test_a_check_that_dies_hangs_or_fails_is_wrong_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {
        "fails": 'print(\'warming up\'); print(\'{"name":"fails","right":false,"found":"off by 3"}\')',
        "dies": "import os; print('half'); os._exit(7)",
        "passes": 'print(\'{"name":"passes","right":true,"found":"fine"}\')',
        "hangs": "import time; time.sleep(600)",
    }
    monkeypatch.setattr(gpu_checks, "CHECKS", scripts)
    monkeypatch.setattr(
        gpu_checks, "module_command", lambda module, name, device: [sys.executable, "-S", "-c", scripts[name]]
    )
    assert list(self_test("cpu", limit_s=4)) == [
        CheckResult("fails", False, "off by 3"),
        CheckResult("dies", False, "its process ended with exit code 7 and no result"),
        CheckResult("passes", True, "fine"),
        CheckResult("hangs", False, "not done within the 4 s for all checks"),
    ]


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 2)])
def test_the_command_says_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: bool, code: int
) -> None:
    there = Inventory("2.13", "13.0", 8, (GPU("H200", "9.0", 100 << 30, 139 << 30),))
    monkeypatch.setattr(inventory, "take_inventory", lambda: there)

    def found(device: str) -> Iterator[CheckResult]:
        assert device == "cuda"
        yield CheckResult("kernels", True, "triton, within 0.01 of torch")
        yield CheckResult("graphs", right, "a replay")

    monkeypatch.setattr(gpu_checks, "self_test", found)
    if code:
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--gpu"])
        assert ended.value.code == code
    else:
        cli.main(["doctor", "--gpu"])
    shown = capsys.readouterr().out
    assert "good  kernels: triton, within 0.01 of torch" in shown
    assert f"{'good' if right else ' bad'}  graphs: a replay" in shown
    assert ("benchmarks/gpu_check.py" in shown) == (not right)


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inventory, "take_inventory", lambda: Inventory("2.13", None, 8, ()))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--gpu"])
    assert ended.value.code == 2
    assert " bad  GPU self-test: torch sees no GPU here" in capsys.readouterr().out
