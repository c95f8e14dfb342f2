"""Invariant numerics on the device: attention cut in other steps, the demo model in many ways, and what it costs."""

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch

from engine.config import Config, build_config
from engine.plugins.attention import flash_attn, triton
from engine.plugins.declaration import convert_declaration
from engine.plugins.testing.attention import require_invariance, through_hook
from engine.types.errors import CallboardError
from gpu_sections import attention_libraries, attention_triton
from gpu_sections.greedy import DEMO
from gpu_sections.needs import installed
from gpu_sections.rows import Row
from gpu_sections.throughput import throughput
from server.extensions.verify.verify import WAYS, Way, digest, mixed_requests, run

# Those that need more than one GPU, or are about a CPU's threads, are left out; one is for a GPU alone.
OTHERS = ("with 2 threads", "over 2 ranks", "over 4 ranks")
GPU_WAYS = (*(one for one in WAYS if one.name not in OTHERS), Way("without graphs", {"graphs": {"mode": "off"}}))


def section(
    device: torch.device,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    number: int = 60,
    names: Sequence[str] = (),
    graphs: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """dtypes: of the demo model.  number: of requests.  names: of ways; all that a GPU has if there are none."""
    yield from _kit(triton, device, attention_triton.cannot_run(device))
    for dtype in dtypes:
        tables = {"numerics": "invariant", "dtype": dtype, "path": str(DEMO)}
        base = {"model": tables, "device": {"kind": device.type}, "graphs": graphs or {}}
        yield from _ways(build_config(Config(), base), number, names)
    if device.type == "cuda":
        yield from _costs(device)
    # Last: where a build of it lacks a size of heads, it ends the process.
    yield from _kit(flash_attn, device, attention_libraries.cannot_run(flash_attn, device))


def _kit(plugin: ModuleType, device: torch.device, cannot: list[Row]) -> Iterator[Row]:
    """A row per dtype: sequences in other steps."""
    name = plugin.PLUGIN.partition(".")[2]
    if cannot:
        yield from ({**row, "case": f"{name}: kit"} for row in cannot)
        return
    declares = convert_declaration(plugin.__name__, plugin.CALLBOARD_PLUGIN)
    factory = through_hook(plugin.callboard_attention_backend, invariant=True)
    for dtype in declares.dtypes:
        row: Row = {"case": f"{name}: kit in {dtype}", "ok": True}
        try:
            require_invariance(factory, declares, dtype, device.type)
        except CallboardError as error:
            row["problem"] = f"skipped: {error}"
        except AssertionError as error:
            row |= {"ok": False, "problem": str(error)[:300]}
        yield row


def _ways(config: Config, number: int, names: Sequence[str]) -> Iterator[Row]:
    """A row per way of running the same requests: whether it gives what the first one did."""
    requests = [one for one in mixed_requests(number) if one[1].grammar is None or installed("llguidance")]
    expected = ""
    for way in (one for one in GPU_WAYS if not names or one.name in names):
        case = f"demo model, {config.model.dtype}, {way.name}"
        try:
            found = digest(run(config, way, requests))
        except CallboardError as error:
            yield {"case": case, "ok": False, "problem": str(error)[:300]}
            continue
        expected = expected or found
        differs = "" if found == expected else "other bits than the first way"
        yield {"case": case, "ok": not differs, "problem": differs or found[:16]}


def _costs(device: torch.device) -> Iterator[Row]:
    """Qwen3-0.6B's shape in both numerics.  of_plain: of the speed of fast ones."""
    fast, invariant = (list(throughput(device, numerics=one)) for one in ("fast", "invariant"))
    for plain, row in zip(fast, invariant, strict=True):
        yield {**row, "case": f"invariant, {row['case']}", "of_plain": row["tokens_per_s"] / plain["tokens_per_s"]}
