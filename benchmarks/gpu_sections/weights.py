"""A checkpoint's parts on their way to the device: the engine's copies beside plain ones that check on the host."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.models.weight_copies import HostCopies, WeightCopies, copies_to
from gpu_sections.rows import Row, seconds_of


def weights(device: torch.device, num_bytes: int = 3 << 27, num_parts: int = 3) -> Iterator[Row]:
    """Yield rows of bfloat16 parts that go to parameters of two dtypes; then of one with a NaN, which must be named.

    Each part takes more than one of the engine's buffers."""
    drawn = torch.randn(num_bytes // num_parts // 2048, 1024).bfloat16()
    parts = [drawn * 2**number for number in range(num_parts)]
    for dtype in (torch.bfloat16, torch.float32):
        targets = [torch.zeros(part.shape, dtype=dtype, device=device) for part in parts]
        ours = seconds_of(_loading(copies_to(device), targets, parts), device)
        differing = sum(int((one != part.to(device, dtype)).sum()) for one, part in zip(targets, parts, strict=True))
        plain = seconds_of(_loading(HostCopies(), targets, parts), device)
        row = {"case": f"{num_bytes >> 20} MB to {str(dtype).removeprefix('torch.')}", "ok": not differing}
        rate = num_bytes / ours / 1e9
        yield {**row, "error": differing, "us": ours * 1e6, "gb_per_s": rate, "of_plain": plain / ours}
    parts[-1][-1, -1] = torch.nan
    copies = copies_to(device)
    _copy(copies, targets, parts)
    named = copies.damaged()
    yield {"case": f"a NaN in the last part, found in {named}", "ok": named == f"part {num_parts - 1}"}


def _loading(copies: WeightCopies, targets: list[Tensor], parts: list[Tensor]) -> Callable[[], object]:
    def load() -> None:
        _copy(copies, targets, parts)
        assert copies.damaged() is None, "the parts are finite"

    return load


def _copy(copies: WeightCopies, targets: list[Tensor], parts: list[Tensor]) -> None:
    for number, (target, part) in enumerate(zip(targets, parts, strict=True)):
        copies.copy(target, part, f"part {number}")
