"""What 0 and 'auto' come to, by device and by what a user has set."""

import ctypes
import logging
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import Config, build_config
from engine.execution.device import choose_device
from engine.host import device_defaults
from engine.host.device_defaults import (
    GIB,
    driver_cuda,
    gpu_bytes,
    gpu_generation,
    multiplies_float8_blocks,
    with_device_defaults,
)
from engine.settings.sections import DeviceSection
from engine.types.errors import ConfigError


def settings(config: Config) -> tuple[int, int, int, float, str]:
    scheduler = config.scheduler
    sizes = scheduler.max_running, scheduler.max_step_tokens, scheduler.prefill_chunk
    return *sizes, config.kv.memory_fraction, config.placement.executor


def configured(**sections: Any) -> Config:
    return build_config(Config(), sections)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(bytes): a machine with such a GPU."""
    monkeypatch.setattr(device_defaults, "version", lambda name: "2.11.0+cu130")
    return lambda num_bytes: monkeypatch.setattr(device_defaults, "gpu_bytes", lambda: num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "kind", "expected", "reason"),
    [
        (0, "auto", (64, 2048, 512, 0.85, "inline"), "no GPU is present"),
        (24 * GIB, "cpu", (64, 2048, 512, 0.85, "inline"), "device.kind=cpu"),
        (24 * GIB, "auto", (256, 8192, 2048, 0.9, "process"), "a GPU of 24 GiB"),
        (140 * GIB, "auto", (512, 8192, 2048, 0.9, "process"), "a GPU of 140 GiB"),
        (0, "cuda", (256, 8192, 2048, 0.9, "process"), "device.kind=cuda"),
    ],
)
def test_the_device_decides_and_one_line_says_so(
    gpu: Any, caplog: pytest.LogCaptureFixture, num_bytes: int, kind: str, expected: tuple[Any, ...], reason: str
) -> None:
    caplog.set_level(logging.INFO)
    gpu(num_bytes)
    chosen = with_device_defaults(configured(device={"kind": kind}))
    assert settings(chosen) == expected
    (line,) = caplog.messages
    assert line.startswith(f"auto: scheduler.max_running={expected[0]} ")
    assert line.endswith(f" placement.executor={expected[4]} ({reason})")
    assert with_device_defaults(chosen) == chosen
    assert len(caplog.messages) == 1, "nothing was left to choose"


def test_a_torch_for_cpus_alone_does_not_see_the_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(140 * GIB)
    monkeypatch.setattr(device_defaults, "version", lambda name: "2.11.0+cpu")
    assert settings(with_device_defaults(Config())) == (64, 2048, 512, 0.85, "inline")


def test_what_is_set_is_kept_and_the_rest_goes_with_it(gpu: Any) -> None:
    gpu(0)
    assert settings(with_device_defaults(configured(scheduler={"max_running": 4000})))[:3] == (4000, 4000, 512)
    assert settings(with_device_defaults(configured(scheduler={"max_step_tokens": 32})))[:3] == (32, 32, 32)
    given = configured(
        scheduler={"max_running": 3, "max_step_tokens": 9, "prefill_chunk": 5},
        kv={"memory_fraction": 0.5},
        placement={"executor": "process"},
    )
    assert with_device_defaults(given) == given


def test_ranks_on_several_machines_are_processes(gpu: Any) -> None:
    gpu(0)
    assert with_device_defaults(Config(), several_machines=True).placement.executor == "process"


class Driver:
    """libcuda.  fails: the function that does not succeed."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = 80 * GIB
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 9}[arguments[1]]
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = 12080
            return 100 if name == self._fails else 0

        return call


def test_the_driver_says_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    for library, expected in (
        (lambda name: Driver(), 80 * GIB),
        (lambda name: Driver("cuInit"), 0),
        (lambda name: Driver("cuDeviceGet"), 0),
        (lambda name: SimpleNamespace(), 0),
        (refuse, 0),
    ):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert gpu_bytes() == expected
        assert gpu_generation() == (9 if expected else 0)


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_driver_that_is_older_than_torch_is_an_error_and_no_cpu(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with pytest.raises(ConfigError, match=r"made for CUDA 13\.0, .*supports CUDA 12\.8; .*kind=cpu"):
        choose_device(DeviceSection(kind=kind), 0)
    assert choose_device(DeviceSection(kind="cpu"), 0).type == "cpu"


def test_a_driver_without_a_gpu_or_a_torch_for_cpus_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert choose_device(DeviceSection(), 0).type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("cuInit"))
    assert choose_device(DeviceSection(), 0).type == "cpu"
    assert driver_cuda() == "12.8"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert driver_cuda() == ""


@pytest.mark.parametrize(
    ("built", "expected"),
    [("2.13.0", True), ("2.11.0+cu130", True), ("2.11.0+cu129", True), ("2.11.0+cu128", False), ("", False)],
)
def test_which_builds_of_torch_multiply_float8_by_blocks(
    built: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if not built:
            raise PackageNotFoundError(name)
        return built

    monkeypatch.setattr(device_defaults, "version", version)
    assert multiplies_float8_blocks() == expected
