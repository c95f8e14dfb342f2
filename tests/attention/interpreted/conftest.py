"""Keeps these modules out of a run without Triton's interpreter, which must be chosen before triton is imported.

``tests/attention/test_triton_interpreted.py`` runs them in a process of their own.
"""

import os

import numpy as np
import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def as_on_a_device():
    """One thread, and no word from numpy, which the interpreter computes with, about overflow and NaN."""
    torch.set_num_threads(1)
    with torch.inference_mode(), np.errstate(all="ignore"):
        yield
