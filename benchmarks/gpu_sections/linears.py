"""Linear kernels for GPUs: through the conformance kit, captured in a graph, and timed beside torch's own product."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch

from engine.plugins.declaration import read_declaration
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linears import INVARIANT, PREFERRED
from engine.plugins.manager import BUILTIN
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.linear import check_linear
from engine.types.errors import PluginError
from gpu_sections.rows import Row, device_seconds, skipped

DTYPE = torch.bfloat16
SHAPES = ((3072, 1024), (1024, 3072))  # Qwen3-0.6B's gate or up, and down projections
ROWS = (1, 8, 64, 512, 4096)
# Beside the defaults: what is faster, and how much it loses.
OPTIONS: Mapping[str, Mapping[str, bool]] = {"torch_fp8": {"fast_accumulation": True}}


@dataclass(frozen=True)
class Timed:
    """A kernel on weights of one shape.  ring: so many weights that no cache holds them."""

    name: str
    quantization: str
    shape: tuple[int, int]
    ring: int
    options: Mapping[str, bool] = field(default_factory=dict)


def section(
    device: torch.device, rows: Sequence[int] = ROWS, shapes: Sequence[tuple[int, int]] = SHAPES, ring: int = 64
) -> Iterator[Row]:
    """Every kernel that says it runs on a GPU."""
    if device.type != "cuda":
        yield skipped("these kernels are for GPUs")
        return
    for name in (*PREFERRED, *INVARIANT):
        declares = read_declaration(BUILTIN[f"linear.{name}"])
        assert declares is not None, name
        if declares.devices and "cuda" not in declares.devices:
            continue
        hook = import_module(BUILTIN[f"linear.{name}"]).callboard_linear
        try:
            hook(LinearContext("cuda", "bfloat16", declares.quantizations[0], checkpoint_dtype="bfloat16"))
        except PluginError as error:
            yield skipped(f"{name}: {error}")
            continue
        try:
            check_linear(hook, declares, "cuda")
            yield {"case": f"{name} kit", "ok": True}
        except ConformanceError as error:
            yield {"case": f"{name} kit", "ok": False, "problem": str(error)[:600]}
            continue
        for quantization in declares.quantizations:
            for shape in shapes:
                yield from _times(Timed(name, quantization, shape, ring), device, rows)
                if options := OPTIONS.get(name):
                    yield from _times(Timed(name, quantization, shape, ring, options), device, rows)


@torch.inference_mode()
def _times(timed: Timed, device: torch.device, rows: Sequence[int]) -> Iterator[Row]:
    hook = import_module(BUILTIN[f"linear.{timed.name}"]).callboard_linear
    kernel = hook(
        LinearContext("cuda", "bfloat16", timed.quantization, checkpoint_dtype="bfloat16", options=dict(timed.options))
    )
    plain = [torch.randn(timed.shape, device=device, dtype=DTYPE) for _ in range(timed.ring)]
    packed = [kernel.pack(weight) for weight in plain]
    for count in rows:
        x = torch.randn(count, timed.shape[1], device=device, dtype=DTYPE)
        own = device_seconds(lambda x=x: [torch.nn.functional.linear(x, one) for one in plain], device, calls=1)
        seconds = own
        if packed[0] is not None:
            seconds = device_seconds(lambda x=x: [one(x, None) for one in packed], device, calls=1)
        name = " ".join((timed.name, *timed.options))
        row = {"case": f"{name} {timed.quantization} {timed.shape[0]}x{timed.shape[1]} rows {count}", "ok": True}
        if packed[0] is not None:
            expected = torch.nn.functional.linear(x.float(), plain[0].float())
            row["error"] = float((packed[0](x, None).float() - expected).norm() / expected.norm())
        yield {**row, "us": seconds / timed.ring * 1e6, "of_plain": own / seconds}
