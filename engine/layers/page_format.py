"""How pages keep keys and values: as the model computes them, rounded to fewer bits, or as int8 with a scale.

Legend: T tokens · L any number of tokens · G KV heads · H head size
        R size of a record: what is kept of one token's key or value in one head
Owns: the rounding, once, when a token is written, and the way back.  Does not know: pages, layers, who reads.
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
LARGEST = {"float16": 65504.0, "fp8_e4m3": 448.0}  # of those that are too narrow for what models compute
SCALED = "int8"
SCALE = torch.float32
LARGEST_INT8 = 127
SMALLEST_SCALE = 1e-30  # of a vector of zeros, which has to be divided by something


@dataclass(frozen=True, slots=True)
class PageFormat:
    """dtype: of keys and values as a model computes and reads them.
    kv_dtype: what pages keep, a name in ``STORED``; '' for the same.
    scaled: whether a record ends with a scale; if not, it is H numbers of the type ``stored``.
    limit: the largest number that is kept; 0 for all that there are.

    'int8' has one scale for each token and head, which makes its largest number 127.  It follows the H numbers in the
    same record, so whatever copies pages copies scales.  The other types have no scale: a number that is too large for
    'float16' or 'fp8_e4m3' becomes their largest.
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
        """Whether records are keys and values as the model computes them."""
        return self.stored == self.dtype

    @property
    def stored(self) -> torch.dtype:
        """The type of the numbers."""
        return STORED[self.kv_dtype] if self.kv_dtype else self.dtype

    @property
    def memory(self) -> torch.dtype:
        """The type to copy records by: torch copies bytes where it does not copy numbers of 8 bits."""
        return torch.uint8 if self.stored.itemsize == 1 else self.stored

    def record_size(self, head_size: int) -> int:
        """R, in elements of ``memory``.  Raises ConfigError if a scale cannot stand behind so many numbers."""
        if self.scaled and head_size % SCALE.itemsize:
            raise ConfigError(
                f"kv.dtype={self.kv_dtype}: heads of {head_size} leave no room for their scale, it takes multiples of "
                f"{SCALE.itemsize}; set kv.dtype to 'auto' or 'bfloat16'"
            )
        return head_size + (SCALE.itemsize if self.scaled else 0)

    def numbers(self, records: Tensor) -> Tensor:
        """A view of records as numbers of the type ``stored``; as they are, if there are scales among them."""
        return records if self.scaled else records.view(self.stored)

    def encode(self, x_TGH: Tensor) -> Tensor:
        """x_TGR, as ``memory``.  x_TGH may be a part of a wider tensor."""
        if self.scaled:
            x_TGH = x_TGH.to(SCALE)
            scale_TG1 = (x_TGH.abs().amax(-1, keepdim=True) / LARGEST_INT8).clamp_min(SMALLEST_SCALE)
            numbers_TGH = (x_TGH / scale_TG1).round().to(torch.int8)
            return torch.cat((numbers_TGH.view(torch.uint8), scale_TG1.view(torch.uint8)), -1)
        if self.limit:
            x_TGH = x_TGH.clamp(-self.limit, self.limit)
        return x_TGH.to(self.stored).view(self.memory)

    def decode(self, x_LGR: Tensor, out_LGH: Tensor) -> Tensor:
        """What ``encode`` was given, rounded; written to ``out_LGH``, which is returned.  x_LGR: as ``memory``."""
        if not self.scaled:
            return out_LGH.copy_(x_LGR.view(self.stored))
        numbers_LGH, scale_LG1 = x_LGR.split((x_LGR.shape[-1] - SCALE.itemsize, SCALE.itemsize), -1)
        return out_LGH.copy_(numbers_LGH.view(torch.int8)).mul_(scale_LG1.view(SCALE))
