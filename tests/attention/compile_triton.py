"""Compiles the triton backend's kernels for an H200 (sm_90a) on a machine without a GPU, by its own launches.

    python -m tests.attention.compile_triton                  # the default tiles of every case
    python -m tests.attention.compile_triton --candidates     # and all that tuning would try, where a case says so

Prints one line of JSON per variant: registers, bytes of stack and of spills, shared memory, copies ahead of use.
What the interpreter cannot see shows here: types that do not match, shapes that the hardware has no instruction for,
tiles that do not fit, loads that the compiler does not start ahead of their use.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import triton

from engine.kernels import dependent_launch
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import backend, prefix
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.prefix import LEAST_ROWS
from engine.plugins.attention.triton.tiles import (
    DecodeTiles,
    PrefillTiles,
    decode_candidates,
    prefill_candidates,
)
from tests.attention.recorded_launches import H200, KERNELS, SHARED_KERNELS
from tests.no_gpu import NoGPU, order, resources


@dataclass(frozen=True)
class Case:
    """One shape.  every_candidate: all tiles that tuning would try, too.  invariant: the same bits in every step."""

    num_heads: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    latent_size: int = 0
    kv_dtype: str = ""
    every_candidate: bool = False
    invariant: bool = False
    num_decodes: int = 3


CASES = [
    Case(every_candidate=True),
    Case(dtype="float16", window=1000, soft_cap=50.0, sinks=True, kv_dtype="fp8_e4m3"),
    Case(num_heads=8, num_kv_heads=1, head_size=256, page_size=256, every_candidate=True),
    Case(invariant=True),
    Case(num_decodes=LEAST_ROWS),
    # The tests compile those above.
    Case(kv_dtype="fp8_e4m3", every_candidate=True),
    Case(kv_dtype="fp8_e4m3", soft_cap=50.0, sinks=True, window=1000, invariant=True),
    Case(num_heads=8, num_kv_heads=1, head_size=256, invariant=True),
    Case(num_heads=16, num_kv_heads=1, head_size=576, latent_size=512, every_candidate=True),
    Case(num_heads=128, num_kv_heads=1, head_size=576, latent_size=512),
    Case(num_heads=40, page_size=64),
    Case(num_heads=8, num_kv_heads=8, head_size=64, page_size=1),
    Case(num_heads=32, head_size=80, page_size=32),
    Case(head_size=96, page_size=128, window=4096),
    Case(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32"),
    Case(dtype="float32"),
    Case(head_size=256, dtype="float32"),
]


@dataclass
class Compiler:
    """Stands in for a launch: compiles what would be launched."""

    kernels: list[Any] = field(default_factory=list)

    def watch(self, module: Any, name: str) -> None:
        """From now on this kernel[grid](...) compiles only."""
        kernel = getattr(module, name)

        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = kernel.warmup(*args, grid=(1, 1), **kwargs)
            if compiled not in self.kernels:
                self.kernels.append(compiled)

        class Watched:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                assert all(0 < size < (1 << 31, *(1 << 16,) * 2)[axis] for axis, size in enumerate(grid)), (
                    f"grid {grid}"
                )
                return launch

        setattr(module, name, Watched())


def launch(case: Case, compiler: Compiler, candidates: bool) -> list[dict[str, Any]]:
    """What attending to a mixed batch of this shape launches, once for each choice of tiles."""
    dtype = getattr(torch, case.dtype)
    spec = AttentionSpec(
        num_layers=1,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        scale=case.head_size**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=(torch.zeros(case.num_heads, dtype=dtype),) if case.sinks else (),
        latent_size=case.latent_size,
    )
    place = (dtype, torch.device("cpu"), "layer_first", case.kv_dtype, case.latent_size)
    pool = KVPool(1, 8, case.page_size, case.num_kv_heads, case.head_size, *place)
    attention = TritonAttention(spec, pool, H200, case.invariant)
    attention._interpreted = False
    rows = case.num_decodes + 2
    batch = AttentionBatch(
        num_decodes=case.num_decodes,
        page_table_BP=torch.zeros((rows, 3), dtype=torch.int32),
        lengths_B=torch.ones(rows, dtype=torch.int32),
        query_starts_B1=torch.arange(rows + 1, dtype=torch.int32),
        host_lengths=np.ones(rows, np.int32),
        host_query_lengths=np.ones(rows, np.int32),
    )
    q_TNH = torch.zeros((rows, case.num_heads + 2 * case.num_kv_heads, case.head_size), dtype=dtype)[
        :, : case.num_heads
    ]
    every: list[DecodeTiles | PrefillTiles | None] = [None]
    if case.every_candidate and candidates:
        every += decode_candidates(spec.value_size, dtype.itemsize, H200, not pool.format.plain)
        every += prefill_candidates(spec.value_size, dtype.itemsize, H200)
    found = []
    for tiles in every:
        attention.plan_step(batch, tiles)
        attention.attend(0, q_TNH)
        for kernel in compiler.kernels:
            stats = resources(kernel) | copies(kernel) | order(kernel)
            found.append({"kernel": kernel.metadata.name, **asdict(case), "tiles": repr(tiles or "default"), **stats})
        compiler.kernels.clear()
    return found


def copies(kernel: Any) -> dict[str, int]:
    """To shared memory, beside the computation: of 16 bytes each, or of fewer."""
    return {name: kernel.asm["ptx"].count(f"cp.async.{kind}") for name, kind in (("wide", "cg"), ("narrow", "ca"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of them")
    arguments = parser.parse_args()
    triton.runtime.driver.set_active(NoGPU())
    dependent_launch.has_dependent_launch = lambda device: True
    compiler = Compiler()
    for name in KERNELS:
        compiler.watch(backend, name)
    for name in SHARED_KERNELS:
        compiler.watch(prefix, name)
    for case in CASES[: arguments.cases]:
        for row in launch(case, compiler, arguments.candidates):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
