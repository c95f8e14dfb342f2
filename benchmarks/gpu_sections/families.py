"""Tiny checkpoints of every family through the whole engine, in float32: the tokens that transformers generates.

They lie in ``build/families``; ``python -m tests.models.answers build/families`` writes them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from callboard import LLM, SamplingParams
from engine.types.errors import ConfigError, PluginError
from gpu_sections.rows import Row, skipped
from gpu_sections.stepping import captures, unmeasured

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "families"
ANSWERS = "answers.json"
FAMILY_S = 90.0  # of one checkpoint
MOST_WORKERS = 8  # processes on one GPU, each with a context and a small pool


def section(device: torch.device, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """A row per checkpoint and mode of graphs, as it ends.  names: only these."""
    found = sorted(path.parent for path in FOLDER.glob(f"*/{ANSWERS}") if not names or path.parent.name in names)
    if not found:
        yield skipped(f"no checkpoints there; python -m tests.models.answers {FOLDER} writes them")
        return
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(workers) as pool:
        writing = [pool.submit(_in_process, path, device.type) for path in found]
        for done in as_completed(writing):
            yield from done.result()


def _in_process(path: Path, kind: str) -> list[Row]:
    """Return the rows of a process of its own, or one that says how it failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))}
    inherited = os.environ.get("PYTHONPATH", "")
    environment["PYTHONPATH"] += os.pathsep + inherited if inherited else ""
    command = [sys.executable, "-m", "gpu_sections.families", str(path), kind]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=FAMILY_S)
    except subprocess.TimeoutExpired:  # by itself, as the end of the section's process would not end this one
        return [{"case": path.name, "ok": False, "problem": f"not done in {FAMILY_S:g} s"}]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [{"case": path.name, "ok": False, "problem": lines[-1][:300]}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _rows(path: Path, kind: str) -> list[Row]:
    """Return a row for each mode of graphs."""
    device = torch.device(kind)
    torch.set_num_threads(1)
    answers = json.loads((path / ANSWERS).read_text())
    prompts, expected = answers["prompts"], answers["tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=len(expected[0]), ignore_eos=True)
    rows = []
    for mode in ("off", "auto") if captures(device) else ("off",):
        tables = {
            "device": {"kind": kind},
            "model": {"dtype": "float32", "tokenizer": "none", "max_model_len": 128},
            "kv": {"num_pages": 64},
            "graphs": {"mode": mode, "max_tokens": 32},
            "scheduler": {"max_running": len(prompts), "prefill_chunk": 24, "max_step_tokens": 96},
        }
        try:
            llm = _engine(path, tables, device)
        except ConfigError as error:  # what runs on CPUs alone
            return [skipped(str(error), path.name)]
        with llm:
            # Twice: the second time prompts are found in the prefix cache.
            for again in ("", ", cached"):
                outputs = [one.token_ids for one in llm.generate(prompts, params)]
                same = sum(one == other for one, other in zip(outputs, expected, strict=True))
                case = f"{path.name}, graphs {mode}{again}: {same} of {len(prompts)} outputs"
                rows.append({"case": case, "ok": outputs == expected})
    return rows


def _engine(path: Path, tables: dict[str, Any], device: torch.device) -> LLM:
    """Return an engine; with torch's attention for families that need what this project's kernels do not have."""
    try:
        return LLM(str(path), progress=False, config={**tables, "plugins": unmeasured(device)})
    except PluginError:
        return LLM(str(path), progress=False, config={**tables, "plugins": {"attention": "torch"}})


if __name__ == "__main__":
    print(json.dumps(_rows(Path(sys.argv[1]), sys.argv[2])))
