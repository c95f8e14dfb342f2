"""Keeps these modules out of a run without Triton's interpreter, which must be chosen before triton is imported.

``tests/kernels/test_interpreted.py`` runs them in processes of their own.
"""

import os
import warnings

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
