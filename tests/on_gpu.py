"""Runs tests that were written for Triton's interpreter on a GPU, by compiled kernels: a pytest plugin.

    python -m pytest -p tests.on_gpu -n 8 tests/kernels/interpreted tests/attention/interpreted -k "not mistake"

Tests put their tensors on the CPU.  Here a function that makes a tensor makes it on the GPU, with the numbers that the
CPU would draw, and a tensor that numpy reads comes back.  A test that plants a mistake, or that reads what the
interpreter alone has, is not for it.

Owns: where tensors of a test are.  Does not know: what is tested.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

GPU = "cuda"
os.environ["CALLBOARD_TESTS_ON_GPU"] = "1"


class OnGPU(TorchFunctionMode):
    """While it is entered, tensors are made on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            generator = kwargs.get("generator")
            if generator is not None or func in (torch.randn, torch.rand, torch.randint, torch.randperm):
                kwargs["device"] = "cpu"
                return func(*args, **kwargs).to(GPU)
            if torch.device(kwargs.get("device") or "cpu").type == "cpu":
                kwargs["device"] = GPU
            return func(*args, **kwargs)
        if func in (torch.from_numpy, torch.frombuffer):
            return func(*args, **kwargs).to(GPU)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            return func(args[0].cpu(), *args[1:], **kwargs)
        if func is torch.Tensor.to and args[1:] and str(args[1]) == "cpu":
            return args[0] if len(args) == 2 else func(args[0], *args[2:], **kwargs)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def on_gpu() -> Any:
    """Make each test's tensors on the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    np.seterr(all="ignore")
    with OnGPU():
        yield
    torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
