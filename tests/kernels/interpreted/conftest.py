"""Keeps these modules out of a run without Triton's interpreter, which must be chosen before triton is imported.

``tests/kernels/test_interpreted.py`` runs them in processes of their own.
"""

import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def as_on_a_device():
    """No gradients, and no word from numpy, which the interpreter computes with, about overflow and NaN."""
    with torch.inference_mode(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def float8_as_a_gpu_rounds_it(monkeypatch: pytest.MonkeyPatch):
    """The interpreter rounds 31.6 to 16: it drops what carries over from the mantissa to the exponent.  It reads NaN as
    480."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(numbers: np.ndarray, of: Any, to: Any, rounding: Any) -> np.ndarray:
        if of == tl.float8e4nv and to == tl.float32:
            return torch.from_numpy(numbers.view(np.uint8)).view(torch.float8_e4m3fn).float().numpy().view(np.uint32)
        if to != tl.float8e4nv:
            return convert(numbers, of, to, rounding)
        return torch.from_numpy(numbers.view(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture
def nan_as_a_gpu_clamps_it(monkeypatch: pytest.MonkeyPatch):
    """The interpreter keeps NaN in every clamp; a GPU makes it the lower bound unless it is to be kept."""
    import triton.language as tl
    from triton.runtime import interpreter

    def clipped(numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.fmin(np.fmax(numbers, low), high)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        return self.ternary_op(x, low, high, np.clip if propagate_nan == tl.PropagateNan.ALL else clipped)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_clampf", clamp)
