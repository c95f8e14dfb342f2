"""``python -m tests.execution.largest_step PATH MAX_LEN STEP_TOKENS``: what a CPU's largest step takes, and should.

A process of its own, since a process's peak is its for good.
"""

import json
import sys
from pathlib import Path

import torch

from engine.config import Config, build_config
from engine.control.system import System
from engine.graphs.rank import StepParts
from engine.startup.loading import load_runner
from engine.startup.memory import host_needs, run_largest_step
from engine.startup.model_steps import ModelSteps


def anonymous_and_peak() -> tuple[int, int]:
    """Bytes that are resident now, and that have been at most."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, peak


def main() -> None:
    path, max_len, step_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sections = {
        "model": {"path": path, "tokenizer": "none", "max_model_len": max_len, "load_format": "dummy"},
        "device": {"kind": "cpu"},
        "kv": {"num_pages": -(-max_len // 16)},
        "scheduler": {"max_step_tokens": step_tokens},
    }
    system = System(build_config(Config(), sections))
    config, spec = system.config, system.spec
    runner = load_runner(config, spec, max_len, system.engine.plugins, rank=0, progress=False)
    before, _ = anonymous_and_peak()
    steps = ModelSteps(StepParts(runner._model, runner._pool, runner._attention, runner._rows, runner._sampler))
    run_largest_step(config, max_len, steps)
    _, peak = anonymous_and_peak()
    needs = host_needs(config, spec.shape, max_len, torch.float32)
    estimate = needs.activation_bytes + needs.product_bytes
    json.dump({"taken": peak - before, "activations": needs.activation_bytes, "estimate": estimate}, sys.stdout)


if __name__ == "__main__":
    main()
