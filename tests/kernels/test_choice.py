"""Who does the work on which device, and what is said about it."""

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch

from engine.kernels import choice
from engine.kernels.choice import choose_kernels
from engine.types.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Nothing chosen yet, and nothing asked for."""
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice._choose.cache_clear()
    yield
    choice._choose.cache_clear()


@pytest.fixture
def broken(monkeypatch):
    """A GPU on which the first kernel fails."""
    from engine.kernels.fused import FusedKernels

    def fail(self):
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(FusedKernels, "try_out", fail)


def test_a_cpu_uses_torch_and_says_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        assert choose_kernels(CPU) is None
    assert not caplog.records


def test_a_cpu_does_not_even_import_triton():
    code = "import sys, torch, engine.models.decoder; from engine.sampling.sampler import Sampler; "
    code += "Sampler(1, 8, 8, torch.device('cpu')); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@needs_triton
def test_a_gpu_uses_kernels_if_one_runs_and_says_so_once(monkeypatch, caplog):
    from engine.kernels.fused import FusedKernels

    monkeypatch.setattr(FusedKernels, "try_out", lambda self: None)
    with caplog.at_level(logging.INFO):
        kernels = choose_kernels(CUDA)
        assert isinstance(kernels, FusedKernels)
        assert choose_kernels(torch.device("cuda", 3)) is kernels
    assert [one.message for one in caplog.records] == ["kernels: triton (an NVIDIA GPU is present)"]


@needs_triton
def test_a_gpu_without_working_kernels_uses_torch_and_says_why(broken, caplog):
    assert choose_kernels(CUDA) is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "RuntimeError: no kernel image is available for execution on the device" in record.message
    assert "10 to 30 times slower" in record.message


@needs_triton
def test_kernels_that_are_asked_for_and_cannot_run_are_an_error(broken, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(ConfigError, match=r"CALLBOARD_KERNELS=triton: kernels cannot run on 'cuda' .*no kernel image"):
        choose_kernels(CUDA)


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"on 'cpu' here \(TRITON_INTERPRET is not 1"):
        choose_kernels(CPU)


def test_torch_can_be_asked_for_on_a_gpu(monkeypatch, caplog):
    monkeypatch.setenv(choice.VARIABLE, "torch")
    with caplog.at_level(logging.INFO):
        assert choose_kernels(CUDA) is None
    assert [one.message for one in caplog.records] == ["kernels: torch (CALLBOARD_KERNELS=torch)"]


def test_another_word_is_an_error_that_lists_the_choices(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="CALLBOARD_KERNELS=cuda: must be torch or triton"):
        choose_kernels(CPU)
