"""Upload of many small host arrays to the device in one copy.

Owns: the place of each array in the packed bytes.  Does not know: what the arrays mean.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT: Final = 16
_DTYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return every array as a device tensor.  Arrays: int32, int64, float32 or float64, one dimension, contiguous."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes] = array.view(np.uint8)
    sent = packed.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_DTYPES[array.dtype])
        for start, array in zip(starts, arrays, strict=True)
    ]
