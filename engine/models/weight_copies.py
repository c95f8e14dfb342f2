"""Copies of checkpoint parts from the host's memory into parameters, with a check for NaN and infinity.

Owns: page-locked buffers, when they may be filled again, when the results of checks are read from the device.
Does not know: files, which part goes where.

A GPU copies from page-locked memory without the host, and finds NaN and infinity a hundred times as fast as a CPU core.
So parts go through two buffers in turn and are checked on the device; the host reads the results once all parts of a
layer are queued.
"""

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

BUFFER_BYTES: Final = 64 << 20
NUM_BUFFERS: Final = 2


class CopyEvent(Protocol):
    """The methods of ``torch.cuda.Event`` that are used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class WeightCopies(Protocol):
    """Copies of the parts of a layer."""

    def copy(self, target: Tensor, part: Tensor, name: str) -> None:
        """Write ``part`` of the tensor ``name``, on the host, to ``target`` of the same shape, in its dtype."""
        ...

    def damaged(self) -> str | None:
        """Wait for all copies; return the name of the first tensor with NaN or infinity, None if there is none."""
        ...


class HostCopies:
    """The ``WeightCopies`` to parameters in the host's memory."""

    def __init__(self) -> None:
        self._damaged: str | None = None

    def copy(self, target: Tensor, part: Tensor, name: str) -> None:
        """Check ``part`` and write it to ``target``."""
        if self._damaged is None and part.numel() and not is_finite(part):
            self._damaged = name
        target.copy_(part)

    def damaged(self) -> str | None:
        """Return the name of the first tensor with NaN or infinity, None if there is none."""
        return self._damaged


class PinnedCopies:
    """The ``WeightCopies`` to parameters of a GPU.  Its buffers are reused from layer to layer."""

    def __init__(
        self,
        device: torch.device,
        new_buffer: Callable[[int], Tensor] | None = None,
        new_event: Callable[[], CopyEvent] = torch.cuda.Event,
    ) -> None:
        """Allocate buffers.  new_buffer: returns uint8 memory of so many bytes; None for page-locked memory."""
        self._device = device
        self._new_buffer = new_buffer or page_locked
        self._buffers = [self._new_buffer(BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
        self._events = [new_event() for _ in range(NUM_BUFFERS)]
        self._num_copies = 0
        self._found: list[tuple[str, Tensor]] = []

    def copy(self, target: Tensor, part: Tensor, name: str) -> None:
        """Queue a write of ``part`` to ``target``, and its check."""
        if not part.numel():
            return
        num_rows = max(1, BUFFER_BYTES // part[0].nbytes)
        for first in range(0, len(part), num_rows):
            self._copy_rows(target[first : first + num_rows], part[first : first + num_rows], name)

    def _copy_rows(self, target: Tensor, rows: Tensor, name: str) -> None:
        index = self._num_copies % NUM_BUFFERS
        event = self._events[index]
        if self._num_copies >= NUM_BUFFERS:
            event.synchronize()  # the copy before the last one may still read the buffer
        if len(self._buffers[index]) < rows.nbytes:
            self._buffers[index] = self._new_buffer(rows.nbytes)
        staged = self._buffers[index][: rows.nbytes].view(rows.dtype).view(rows.shape)
        staged.copy_(rows)
        # Checked in the file's dtype: a value that is infinite only in the parameter's dtype is not damage.
        arrived = staged.to(self._device, non_blocking=True)
        event.record()
        self._num_copies += 1
        target.copy_(arrived)
        self._found.append((name, torch.stack(arrived.aminmax()).isfinite().all()))

    def damaged(self) -> str | None:
        found, self._found = self._found, []
        if not found:
            return None
        fine = torch.stack([one for _, one in found]).tolist()
        return next((name for (name, _), is_fine in zip(found, fine, strict=True) if not is_fine), None)


def is_finite(part: Tensor) -> bool:
    """Return whether all numbers are finite, in one pass without a temporary: aminmax returns NaN if there is one."""
    return all(bound.isfinite().item() for bound in part.aminmax())


def page_locked(num_bytes: int) -> Tensor:
    """Return page-locked uint8 memory, which a GPU reads without the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copies_to(device: torch.device) -> WeightCopies:
    """Return the copies for parameters on the device."""
    return PinnedCopies(device) if device.type == "cuda" else HostCopies()
