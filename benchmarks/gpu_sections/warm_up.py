"""Every other section once in its small size, so that what they compile is on disk when they are timed.

FlashInfer, Triton and Inductor compile on first use, which may take many minutes; a section has two.  Small sizes have
the heads, pages and types of large ones, and so most of their kernels.  What fails here fails again in its own section.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from gpu_sections.rows import Row
from gpu_sections.table import SECTIONS


def warm_up(device: torch.device, names: Sequence[str] = ()) -> Iterator[Row]:
    """names: of sections; all others if there are none."""
    for name in names or [one for one in SECTIONS if one != "warm_up"]:
        start = time.perf_counter()
        try:
            num_rows = len(list(SECTIONS[name].rows(device, small=True)))
        except Exception as error:  # its own section says what is wrong
            said = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            said = f"{num_rows} rows"
        yield {"case": f"{name}: {said}", "ok": True, "us": (time.perf_counter() - start) * 1e6}
