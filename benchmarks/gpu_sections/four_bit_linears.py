"""Products with weights in 4 bits, in groups as AWQ's and GPTQ's files have them, beside weights of 16 bits by torch.

Shapes are of an 8B model's layer.  GB/s counts codes, scales and zeros.  A ring of weights is larger than any cache.
"""

from collections.abc import Iterator, Sequence

import torch

from engine.kernels.choice import choose_kernels
from engine.layers.packing import StoredRows
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import Row, device_seconds

BOUND = 1e-2  # of results of a product, relative to their norm: they are rounded to 16 bits
RING_BYTES = 200 << 20
SHAPES = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (1024, 3072))
ROWS = (1, 16, 32, 64, 128, 512)


@torch.inference_mode()
def section(
    device: torch.device,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    groups: tuple[int, int] = (128, 32),
    rows: Sequence[int] = ROWS,
    ring_bytes: int = RING_BYTES,
) -> Iterator[Row]:
    """A row per size of group, shape and number of rows; for the second size one shape alone, in float16."""
    if choose_kernels(device) is None:
        yield from no_kernels(device)
        return
    from engine.kernels.four_bit_products import FourBitWeight

    generator = torch.Generator().manual_seed(0)
    for group, dtype in zip(groups, (torch.bfloat16, torch.float16), strict=True):
        for outputs, inputs in shapes if group == groups[0] else shapes[:1]:
            blocks = torch.randint(0, 256, (outputs, inputs // group, 3 + group // 2), generator=generator)
            blocks = blocks.to(torch.uint8)
            scales = torch.rand((outputs, inputs // group, 1), generator=generator).half().mul_(0.01)
            blocks[:, :, :2], blocks[:, :, 2] = scales.view(torch.uint8), blocks[:, :, 2] & 15
            stored = StoredRows("random", f"HALF{group}", blocks.flatten(1), inputs)
            count = max(1, ring_bytes // blocks.numel())
            packed = [FourBitWeight([stored], device) for _ in range(count)]
            floats = packed[0].floats(dtype)
            plain = [floats.clone() for _ in range(max(1, count // 4))]
            exact = packed[0].floats(torch.float32).double()
            for num_rows in rows:
                x = torch.randn((num_rows, inputs), generator=generator).to(device, dtype)
                expected = x.double() @ exact.T
                error = float((packed[0](x, None).double() - expected).norm() / expected.norm())
                own = device_seconds(lambda x=x, ring=packed: [one(x, None) for one in ring], device, calls=1)
                other = device_seconds(
                    lambda x=x, ring=plain: [torch.nn.functional.linear(x, one) for one in ring], device, calls=1
                )
                yield {
                    "case": f"{outputs}x{inputs} in groups of {group}, {dtype}, {num_rows} rows",
                    "ok": error <= BOUND,
                    "error": error,
                    "us": own / len(packed) * 1e6,
                    "of_floats": other / len(plain) / (own / len(packed)),
                    "gb_per_s": packed[0].nbytes / (own / len(packed)) / 1e9,
                }
