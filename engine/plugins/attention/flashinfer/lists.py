"""Page lists of a step's sequences in the form that FlashInfer reads: all lists in one array.

Legend: B sequences · I entries of all their page lists · P page-table width
Owns: the arithmetic on the host and, for a captured step, on the device.  Does not know: wrappers, plans.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flashinfer.staging import StagingRing

Int32 = npt.NDArray[np.int32]
ALIGNMENT = 64  # int32s; arrays in a shared buffer start at multiples of 256 bytes, like separate tensors


class HostLists:
    """The input of planning: int32 arrays in page-locked memory, so that their copies to the device do not wait.

    starts_B1: the start of each sequence's pages in the list of all.  last_B: tokens in its last page.
    lengths_B: tokens.  query_starts_B1: the start of its queries.  num_pages: entries of the list.
    """

    def __init__(self, ring: StagingRing, lengths: Int32, query_lengths: Int32, page_size: int) -> None:
        """Fill the arrays.  A length of 0, of a padding row, counts as 1, as FlashInfer needs a token in every row."""
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


class DeviceLists:
    """The lists on the device, in memory that never moves, for rows of up to ``max_pages`` pages each.

    starts_B1, last_B: as in ``HostLists``.  pages_I1: the list of all, and one unused place.  int32."""

    def __init__(self, num_rows: int, max_pages: int, pool: KVPool, pages_I1: Tensor) -> None:
        device = pool.data.device
        self.max_pages = max_pages
        self.starts_B1 = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.last_B = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.pages_I1 = pages_I1
        self._page_size = pool.page_size
        kernels = choose_kernels(device)
        self._list_pages = list_pages if kernels is None else kernels.list_pages

    def fill(self, table_BP: Tensor, lengths_B: Tensor) -> None:
        """Write the lists of these rows; it does not wait, so it may be captured.  lengths_B: at least 1."""
        self._list_pages(table_BP, lengths_B, self._page_size, self.starts_B1, self.last_B, self.pages_I1)


def list_pages(
    table_BP: Tensor, lengths_B: Tensor, page_size: int, starts_B1: Tensor, last_B: Tensor, pages_I1: Tensor
) -> None:
    """Write the lists by torch operators; ``engine/kernels/page_lists.py`` does so in one launch."""
    full_B = (lengths_B - 1) // page_size
    torch.cumsum(full_B + 1, 0, dtype=torch.int32, out=starts_B1[1:])
    last_B.copy_(lengths_B - full_B * page_size)
    gather_pages(table_BP, starts_B1, pages_I1)


def stride_of(num_rows: int) -> int:
    """Return the number of int32s from one array of ``HostLists`` to the next."""
    return -(-(num_rows + 1) // ALIGNMENT) * ALIGNMENT


def gather_pages(table_BP: Tensor, starts_B1: Tensor, pages_I1: Tensor) -> None:
    """Write each row's pages to pages_I1[starts[b]:starts[b + 1]], on the device and without waiting for it.

    All int32.  The last place of pages_I1 belongs to no list: the unused entries of each row go there.
    """
    starts_B1 = starts_B1[:, None]
    column_P = torch.arange(table_BP.shape[1], device=table_BP.device)
    place_BP = column_P + starts_B1[:-1]
    place_BP = torch.where(place_BP < starts_B1[1:], place_BP, len(pages_I1) - 1)
    pages_I1.scatter_(0, place_BP.flatten(), table_BP.flatten())
