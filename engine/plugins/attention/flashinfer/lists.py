"""Where a step's keys are, in the form that FlashInfer reads: all page lists, one behind the other.

Legend: B sequences · I entries of all their page lists · P page-table width
Owns: the arithmetic on the host, and the gathering on the device.  Does not know: wrappers, plans.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.plugins.attention.flashinfer.staging import StagingRing

Int32 = npt.NDArray[np.int32]
ALIGNMENT = 64  # int32s; arrays that share a buffer start at multiples of 256 bytes, as separate tensors would


class HostLists:
    """What planning reads: int32 arrays in page-locked memory, so that their copies to the device wait for nothing.

    starts_B1: where each sequence's pages begin in the list of all.  last_B: tokens in its last page.
    lengths_B: tokens.  query_starts_B1: where its queries begin.  num_pages: entries of the list.
    """

    def __init__(self, ring: StagingRing, lengths: Int32, query_lengths: Int32, page_size: int) -> None:
        """Count a length of 0, which a padded row may have, as 1: FlashInfer wants at least one token of each row."""
        num_rows = len(lengths)
        stride = stride_of(num_rows)
        self.staging = ring.take(4 * stride * 4)
        ints = self.staging.data[: 4 * stride * 4].view(torch.int32)
        lengths = np.maximum(lengths, 1)
        counts = -(-lengths // page_size)
        self.starts_and_last = ints[: 2 * stride]
        self.starts_B1 = ints[: num_rows + 1]
        self.last_B = ints[stride:][:num_rows]
        self.lengths_B = ints[2 * stride :][:num_rows]
        self.query_starts_B1 = ints[3 * stride :][: num_rows + 1]
        for array, values in ((self.starts_B1, counts), (self.query_starts_B1, query_lengths)):
            array[0] = 0
            np.cumsum(values, dtype=np.int32, out=array.numpy()[1:])
        self.last_B.numpy()[:] = lengths - (counts - 1) * page_size
        self.lengths_B.numpy()[:] = lengths
        self.num_pages = int(self.starts_B1[-1])


def stride_of(num_rows: int) -> int:
    """int32s from one array of ``HostLists`` to the next."""
    return -(-(num_rows + 1) // ALIGNMENT) * ALIGNMENT


def gather_pages(table_BP: Tensor, starts_B1: Tensor, pages_I1: Tensor) -> None:
    """Write each row's pages to pages_I1[starts[b]:starts[b + 1]], on the device and without asking it anything.

    All int32.  The last place of pages_I1 belongs to no list: the rest of each row goes there.
    """
    starts_B1 = starts_B1[:, None]
    column_P = torch.arange(table_BP.shape[1], device=table_BP.device)
    place_BP = column_P + starts_B1[:-1]
    place_BP = torch.where(place_BP < starts_B1[1:], place_BP, len(pages_I1) - 1)
    pages_I1.scatter_(0, place_BP.flatten(), table_BP.flatten())
