"""The formats in which pages keep keys and values: as computed, rounded to fewer bits, or as int8 with a scale.

Legend: T tokens · L any number of tokens · G KV heads · H head size
        R size of a record: one token's key or value in one head
Owns: the rounding, once, when a token is written, and the way back.  Does not know: pages, layers, readers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.types.errors import ConfigError

STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
LARGEST = {"float16": 65504.0, "fp8_e4m3": 448.0}  # of the types whose range is narrower than that of the models'
SCALED = "int8"
SCALE = torch.float32
LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-30  # for a vector of zeros, which must not be divided by 0


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The type and layout of a key or value in a page.

    dtype: type in which a model computes and reads them.
    kv_dtype: type in the page, a name in ``STORED``; '' for ``dtype``.
    scaled: whether a record ends with a scale; otherwise it is H numbers of the type ``stored``.
    limit: largest number that is kept; 0 for no limit.

    'int8' has one scale per token and head, which makes the largest number 127.  It follows the H numbers in the same
    record, so a copy of pages copies scales.  The other types have no scale: 'float16' and 'fp8_e4m3' clamp.
    """

    dtype: torch.dtype
    kv_dtype: str = ""
    scaled: bool = field(init=False, compare=False)
    limit: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaled", self.kv_dtype == SCALED)
        object.__setattr__(self, "limit", LARGEST.get(self.kv_dtype, 0.0))

    @property
    def plain(self) -> bool:
        """Whether records are keys and values in the model's own type."""
        return self.stored == self.dtype

    @property
    def stored(self) -> torch.dtype:
        """Type of the numbers in a record."""
        return STORED[self.kv_dtype] if self.kv_dtype else self.dtype

    @property
    def memory(self) -> torch.dtype:
        """Type by which records are copied: bytes for 8-bit numbers, which torch cannot copy as such."""
        return torch.uint8 if self.stored.itemsize == 1 else self.stored

    def record_size(self, head_size: int) -> int:
        """Return R, in elements of ``memory``.  Raises ConfigError if a scale would not be aligned after H numbers."""
        if self.scaled and head_size % SCALE.itemsize:
            raise ConfigError(
                f"kv.dtype={self.kv_dtype}: a scale cannot follow heads of {head_size} elements, only multiples of "
                f"{SCALE.itemsize}; set kv.dtype to 'auto' or 'bfloat16'"
            )
        return head_size + (SCALE.itemsize if self.scaled else 0)

    def head_size(self, record_size: int) -> int:
        """Return H for R."""
        return record_size - (SCALE.itemsize if self.scaled else 0)

    def numbers(self, records: Tensor) -> Tensor:
        """Return a view of records as numbers of the type ``stored``; the records themselves if they have scales."""
        return records if self.scaled else records.view(self.stored)

    def encode(self, x_TGH: Tensor) -> Tensor:
        """Return x_TGR, as ``memory``.  x_TGH may be a part of a wider tensor."""
        if self.scaled:
            x_TGH = x_TGH.to(SCALE)
            scale_TG1 = (x_TGH.abs().amax(-1, keepdim=True) / LARGEST_INT8).clamp_min(SMALLEST_SCALE)
            numbers_TGH = (x_TGH / scale_TG1).round().to(torch.int8)
            return torch.cat((numbers_TGH.view(torch.uint8), scale_TG1.view(torch.uint8)), -1)
        if self.limit:
            x_TGH = x_TGH.clamp(-self.limit, self.limit)
        return x_TGH.to(self.stored).view(self.memory)

    def decode(self, x_LGR: Tensor, out_LGH: Tensor) -> Tensor:
        """Write the rounded numbers of the records x_LGR to ``out_LGH`` and return it."""
        if not self.scaled:
            return out_LGH.copy_(x_LGR.view(self.stored))
        numbers_LGH, scale_LG1 = x_LGR.split((x_LGR.shape[-1] - SCALE.itemsize, SCALE.itemsize), -1)
        return out_LGH.copy_(numbers_LGH.view(torch.int8)).mul_(scale_LG1.view(SCALE))
