"""Attention by triton kernels: decode rows by equal shares of their keys, prompts by tiles of queries.

Legend: T new tokens in the step (ragged, packed) · B sequences · D decode rows (the first D of B) · P page-table width
        N query heads · G KV heads · H head size
Owns: launches and their memory, the choice of tiles.  Does not know: models, the scheduler.

There is no plan: kernels read lengths and page tables on the device, and the host chooses launches by shapes alone.  So
a captured step may be replayed with other lengths and tables in the same tensors, without another ``plan_step``.
Decode rows of length 0 read nothing, and their output is 0.

If results must be the same in every step, decode rows are prompts of one query: a query meets tiles of keys of one size
in the order of positions, and the keys are not split.  Tiles are the default ones, as measured ones may differ at the
next start.  A long context then costs a single decode row more, as one program per KV head reads it.
"""

import math

import msgspec
import torch
from torch import Tensor

from engine.kernels.dependent_launch import launch_options
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton.decode import decode_attention, merge_parts
from engine.plugins.attention.triton.prefill import prefill_attention
from engine.plugins.attention.triton.prefix import LEAST_ROWS, SPLITS, SharedKeys
from engine.plugins.attention.triton.tiles import (
    MAX_PROGRAMS_PER_PROCESSOR,
    DecodeTiles,
    GpuProcessors,
    PrefillTiles,
    default_decode,
    default_prefill,
    padded,
    prefill_bytes,
    processors_of,
)
from engine.plugins.attention.triton.tuning import TileTable, nearest

ROWS_AT_ONCE = 256  # rows whose lengths a program reads together
PARTS_AT_ONCE = 16  # parts of one row
MERGED_AT_ONCE = 8192  # numbers of parts: 64 registers of each of 128 threads
# Of one row's parts for the heads of a program, as one processor reads about 64 bytes a cycle, 110 GB/s: up to here it
# merges them in the time of another launch.
MERGED_BYTES = 128 << 10
LATENT_HEADS = 16  # heads of a program of four warps over latents: the least that tensor cores support
MOST_LATENT_HEADS = 32  # of one of eight warps: more spill registers
# Up to here a program merges one head, so that a long row's parts are read in parallel; beyond, launching that many
# programs, most of them with nothing to do, takes longer.
MAX_MERGE_PROGRAMS = 4096
# A product and a sum as one instruction; set explicitly, as triton's default depends on its version.
FUSION = True


class TritonAttention:
    """An ``AttentionBackend`` on triton kernels.

    tuned: tiles by size, from ``trials.py``; a default is used for other sizes.  invariant: as in
    ``AttentionContext``."""

    capturable = True

    def __init__(
        self, spec: AttentionSpec, pool: KVPool, processors: GpuProcessors | None = None, invariant: bool = False
    ) -> None:
        slots_SGH = pool.keys(0)
        assert slots_SGH.shape[1:] == (spec.num_kv_heads, spec.head_size), f"pool {slots_SGH.shape} is not for {spec}"
        assert spec.scale > 0, f"scale {spec.scale}: the highest score must get the highest weight"
        self.spec = spec
        self.pool = pool
        self._invariant = invariant
        self.processors = processors or processors_of(slots_SGH.device)
        self._interpreted = slots_SGH.device.type == "cpu"
        self._launch = launch_options(slots_SGH.device)
        self._group = spec.num_heads // spec.num_kv_heads
        if spec.latent_size:
            assert spec.num_kv_heads == 1, f"{spec.num_kv_heads} latents for each token"
            # All heads read the same latents, which are wide: some heads fill a program's registers.
            most = MOST_LATENT_HEADS if pool.dtype.itemsize <= 2 else LATENT_HEADS
            self._group = max(one for one in range(1, most + 1) if spec.num_heads % one == 0)
        self._num_groups = spec.num_heads // self._group
        self._first_full = next((one for one in range(spec.num_layers) if not spec.window_of(one)), 0)
        # The kernels use powers of 2.  A cap times the tanh of (score / cap), by a sigmoid of twice that.
        self._scale_log2 = (spec.soft_cap or spec.scale) * math.log2(math.e)
        self._squash = 2 * spec.scale / spec.soft_cap if spec.soft_cap else 0.0
        # The memory of tiles in a processor: float8 is converted to the queries' type there.
        itemsize = pool.dtype.itemsize
        self._default_decode = default_decode(spec.value_size, itemsize, self.processors, not pool.format.plain)
        if spec.latent_size and self._group > LATENT_HEADS:
            self._default_decode = msgspec.structs.replace(self._default_decode, num_warps=8, programs=1)
        self._default_prefill = default_prefill(spec.value_size, itemsize, self.processors)
        self.tuned = TileTable()
        dtype = str(slots_SGH.dtype).removeprefix("torch.")
        heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_size}"
        self.shape = f"{dtype} {heads} page {pool.page_size} window {spec.window}"
        max_shares = self._num_shares(MAX_PROGRAMS_PER_PROCESSOR)
        self._part_out = torch.empty(
            (max_shares, 2, spec.num_heads, spec.value_size), dtype=torch.float32, device=slots_SGH.device
        )
        self._part_weight = torch.empty((max_shares, 2, spec.num_heads), dtype=torch.float32, device=slots_SGH.device)
        self._arrived = torch.zeros((max_shares, self._num_groups), dtype=torch.int32, device=slots_SGH.device)
        self._batch: AttentionBatch | None = None
        self._num_decodes = 0  # rows of the batch for decode kernels
        self._decode: DecodeTiles = self._default_decode
        # Graphs read the memory of the batches that they were captured with, so none of it is freed.
        self._shared: list[SharedKeys] = []
        self._compared: AttentionBatch | None = None
        self._prefill: PrefillTiles = self._default_prefill

    def plan_step(self, batch: AttentionBatch, tiles: DecodeTiles | PrefillTiles | None = None) -> None:
        """Choose tiles by the shapes of the batch, without waiting for the device or starting work on it.

        tiles: used instead, to try them."""
        table_BP = batch.page_table_BP
        assert table_BP.stride(1) == 1, "a sequence's pages must be contiguous"
        context = table_BP.shape[1] * self.pool.page_size
        self._num_decodes = 0 if self._invariant else batch.num_decodes
        if isinstance(tiles, DecodeTiles):
            self._decode = tiles
        elif self._num_decodes:
            found = nearest(self.tuned.decode, self.shape, self._num_decodes, context)
            self._decode = found or self._default_decode
        if isinstance(tiles, PrefillTiles):
            self._prefill = tiles
        elif len(table_BP) > self._num_decodes:
            self._prefill = nearest(self.tuned.prefill, self.shape, 1, context) or self._default_prefill
        self._batch = batch

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        out_TNH = q_TNH.new_empty((*q_TNH.shape[:2], self.spec.value_size))
        self.attend_into(layer, q_TNH, out_TNH)
        return out_TNH

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Write one layer's result to out_TNH."""
        batch, spec = self._batch, self.spec
        assert batch is not None, "plan_step must be called first"
        window = spec.window_of(layer)
        if q_TNH.stride()[1:] != (spec.head_size, 1):
            q_TNH = q_TNH.contiguous()
        if self._num_decodes:
            self._attend_decodes(batch, layer, q_TNH, out_TNH, window)
        if len(batch.lengths_B) > self._num_decodes:
            self._attend_prompts(batch, layer, q_TNH, out_TNH, window)

    def _attend_decodes(self, batch: AttentionBatch, layer: int, q_TNH: Tensor, out_TNH: Tensor, window: int) -> None:
        spec, tiles, num_rows = self.spec, self._decode, self._num_decodes
        num_shares = self._num_shares(tiles.programs)
        many = batch.shares and num_rows >= LEAST_ROWS and not window
        shared = self._shared_keys(batch, layer, q_TNH) if many else None
        parts = (None, None, None) if shared is None else (shared.skips_B, shared.out, shared.weight)
        merges = self._part_bytes(tiles, num_shares, window) <= MERGED_BYTES
        decode_attention[(self._num_groups, num_shares)](
            q_TNH, out_TNH, self.pool.keys(layer), self.pool.values(layer), batch.page_table_BP, batch.lengths_B,
            self._part_out, self._part_weight, self._arrived, num_rows, self._scale_log2, q_TNH.stride(0),
            batch.page_table_BP.stride(0), self._squash, self._sinks(layer), *parts,
            BLOCK_M=max(16, padded(self._group)),  # the least that tensor cores support
            BLOCK_S=min(PARTS_AT_ONCE, max(1, MERGED_AT_ONCE // (padded(self._group) * padded(spec.value_size)))),
            SHARED=shared is not None, SPLITS=SPLITS, MERGES=merges,
            **self._constants(tiles, window),
        )  # fmt: skip
        if merges:
            return
        heads = 1 if num_rows * spec.num_heads <= MAX_MERGE_PROGRAMS else self._group
        merge_parts[(spec.num_heads // heads, num_rows)](
            out_TNH, batch.lengths_B, self._part_out, self._part_weight, num_rows, num_shares, heads,
            self._sinks(layer), *parts,
            NUM_HEADS=spec.num_heads, HEAD_SIZE=spec.value_size, WINDOW=window, SINKS=bool(spec.sinks),
            BLOCK_B=ROWS_AT_ONCE, BLOCK_N=tiles.block_keys, BLOCK_S=PARTS_AT_ONCE, BLOCK_H=padded(spec.value_size),
            SHARED=shared is not None, SPLITS=SPLITS,
            num_warps=4, num_stages=2, enable_fp_fusion=FUSION, **self._launch,
        )  # fmt: skip

    def _part_bytes(self, tiles: DecodeTiles, num_shares: int, window: int) -> int:
        """Return the most bytes that the parts of a row have, for the heads of a program."""
        most = min(num_shares, window // tiles.block_keys + 2) if window else num_shares
        return most * self._group * self.spec.value_size * 4

    def _shared_keys(self, batch: AttentionBatch, layer: int, q_TNH: Tensor) -> SharedKeys | None:
        """Return what rows share, after attention to it; None for latents, of which programs read few heads each."""
        spec, num_rows = self.spec, self._num_decodes
        if spec.latent_size:
            return None
        shared = next((one for one in self._shared if one.max_rows >= num_rows), None)
        if shared is None:
            shared = SharedKeys(padded(num_rows), spec.num_heads, spec.head_size, q_TNH.device)
            self._shared.append(shared)
        # In each pass anew, at the first layer that sees everything: a graph has the launches of one pass.
        if self._compared is not batch or layer == self._first_full:
            page_size, block_keys = self.pool.page_size, self._decode.block_keys
            shared.find(batch.page_table_BP, batch.lengths_B, num_rows, page_size, block_keys, self._launch)
            self._compared = batch
        tiles = msgspec.structs.replace(self._default_prefill, block_keys=self._decode.block_keys)
        if prefill_bytes(tiles, spec.head_size, self.pool.dtype.itemsize) > self.processors.shared_bytes:
            tiles = msgspec.structs.replace(tiles, num_stages=2)
        constants = self._constants(self._decode, 0) | {
            "BLOCK_M": max(tiles.block_rows, padded(self._group)),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        for name in ("TAIL", "SINKS", "WINDOW", "BLOCK_B", "BLOCK_R"):
            del constants[name]
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        table = batch.page_table_BP
        shared.attend(q_TNH, keys, values, table, num_rows, self._scale_log2, self._squash, self._num_groups, constants)
        return shared

    def _attend_prompts(self, batch: AttentionBatch, layer: int, q_TNH: Tensor, out_TNH: Tensor, window: int) -> None:
        tiles, first = self._prefill, self._num_decodes
        num_rows = len(batch.lengths_B) - first
        block_rows = max(tiles.block_rows, padded(self._group))
        # The free rows in the last tile of each sequence make room for this bound, which needs no lengths.
        num_tiles = (len(q_TNH) - first) // (block_rows // self._group) + num_rows
        prefill_attention[(self._num_groups, num_tiles)](
            q_TNH, out_TNH, self.pool.keys(layer), self.pool.values(layer), batch.page_table_BP[first:],
            batch.lengths_B[first:], batch.query_starts_B1[first:],
            num_rows, self._scale_log2, q_TNH.stride(0), batch.page_table_BP.stride(0), self._squash,
            self._sinks(layer),
            BLOCK_M=block_rows, ONE_LOOP=self._invariant, **self._constants(tiles, window),
        )  # fmt: skip

    def _sinks(self, layer: int) -> Tensor | None:
        """Return the layer's sinks; None for a model without."""
        return self.spec.sinks[layer] if self.spec.sinks else None

    def _constants(self, tiles: DecodeTiles | PrefillTiles, window: int) -> dict[str, int]:
        """Return the constants that a kernel which reads keys and values is compiled for."""
        spec = self.spec
        tail = spec.head_size - spec.value_size
        return {
            "NUM_GROUPS": self._num_groups,
            "GROUP": self._group,
            "HEAD_SIZE": spec.value_size,
            "TAIL": tail,
            "SLOT": spec.num_kv_heads * spec.head_size,
            "CAPPED": bool(spec.soft_cap),
            "SINKS": bool(spec.sinks),
            "PAGE_SIZE": self.pool.page_size,
            "PAGE_STRIDE": self.pool.page_stride,
            "WINDOW": window,
            "BLOCK_B": ROWS_AT_ONCE,
            "BLOCK_N": tiles.block_keys,
            "BLOCK_H": padded(spec.value_size),
            "BLOCK_R": max(16, padded(tail)),  # the least that tensor cores support
            "INTERPRETED": self._interpreted,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "enable_fp_fusion": FUSION,
            **self._launch,
        }

    def _num_shares(self, programs: int) -> int:
        """Return the number of shares that the rows' keys are cut into, one per program and KV head."""
        return max(1, self.processors.count * programs // self._num_groups)
