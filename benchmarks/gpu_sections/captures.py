"""Capture time and memory on a GPU: the engine's way, and the others that it could have gone."""

import time
from typing import Any

import torch

from engine.config import Config, build_config
from engine.control.system import System
from engine.graphs import rank
from engine.graphs.capturing import Capturing
from engine.graphs.piecewise import PREFILL
from engine.startup import loading
from gpu_sections.rows import Row, skipped
from gpu_sections.stepping import captures, unmeasured

# (descending, with the warm-up capture, one pool for all sizes)
WAYS = {
    "engine": (True, True, True),
    "no warm-up capture": (True, False, True),
    "ascending": (False, True, True),
    "ascending, no warm-up": (False, False, True),
    "a pool each": (True, True, False),
}


def capture_costs(model: str, way: str, max_tokens: int, max_rows: int, device: torch.device) -> list[dict[str, Any]]:
    """Seconds and MB of piecewise captures up to ``max_tokens`` and decode captures up to ``max_rows``."""
    descending, rehearsal, shared = WAYS[way]
    rows: list[dict[str, Any]] = []

    class Measured(Capturing):
        """Notes what each kind of graph has cost."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args, descending=descending, rehearsal=rehearsal)

        def capture(self, what: str, sizes: Any, warm_up: Any, record: Any, *rest: Any, **named: Any) -> None:
            recorder = record.__self__._recorder

            def record_apart(size: int) -> None:
                recorder.use(self._device.pool())
                record(size)

            # Kernels are compiled and loaded in front of the clock: that costs the same in every way.
            with torch.inference_mode(), self._device.stream():
                for size in sizes:
                    warm_up(size)
            self._device.trim()
            before, start = self._device.memory().free_bytes, time.perf_counter()
            capture_one = record if shared else record_apart
            super().capture(what, sizes, warm_up, capture_one, *rest, **named)
            seconds = time.perf_counter() - start  # captures end with replays, whose time on the GPU is not theirs
            self._device.trim()
            taken = max(1, before - self._device.memory().free_bytes)
            kind = "piecewise" if what == PREFILL else "decode"
            rows.append({"case": way, "what": kind, "sizes": len(sizes), "seconds": seconds, "mb": taken / 1e6})

    sections = {
        "model": {"path": model, "load_format": "safetensors" if model == "demo" else "dummy", "tokenizer": "none"},
        "device": {"kind": device.type},
        "kv": {"num_pages": 256},
        "scheduler": {"max_running": max_rows, "max_step_tokens": max_tokens},
        "graphs": {"mode": "breakable", "max_tokens": max_tokens, "max_rows": max_rows},
        "plugins": unmeasured(device),
    }
    system = System(build_config(Config(), sections))
    rank.Capturing = Measured  # type: ignore[misc]
    try:
        loading.load_runner(system.config, system.spec, system.max_len, system.engine.plugins, rank=0, progress=False)
    finally:
        rank.Capturing = Capturing  # type: ignore[misc]
    return rows


def section(device: torch.device, max_tokens: int = 1024, max_rows: int = 64) -> list[Row]:
    """The demo model, as the engine does it; ``benchmarks/bench_graphs.py`` compares the other ways."""
    if not captures(device):
        return [skipped("this device captures nothing")]
    rows = capture_costs("demo", "engine", max_tokens, max_rows, device)
    return [
        {"case": f"{row['sizes']} sizes, {row['what']}", "ok": True, "us": row["seconds"] * 1e6, "mb": row["mb"]}
        for row in rows
    ]
