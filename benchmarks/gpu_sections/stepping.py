"""A runner without an engine around it, for sections that time single steps.

Owns: the pages of rows, that the pool has them, the steps' bytes.  Does not know: what is measured.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.graphs import rank
from engine.messages import Admission, Step
from engine.startup.loading import load_runner
from engine.types.params import SamplingParams

PAGE_SIZE = 16


@contextmanager
def checkpoint(config: dict[str, Any]) -> Iterator[str]:
    """A directory for random weights of this shape."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield directory


def captures(device: torch.device) -> bool:
    """Whether an engine on this device has graphs."""
    return rank.device_for_graphs(device).captures


def unmeasured(device: torch.device) -> dict[str, Any]:
    """The section ``plugins`` of an engine that has no race of attention backends: this project's own where there are
    graphs, else the first that can run."""
    return {"race_s": 0, "attention": "triton" if captures(device) else "auto"}


def load(
    path: str,
    device: torch.device,
    max_rows: int,
    num_pages: int,
    max_step_tokens: int,
    mode: str,
    attention: str = "auto",
) -> ModelRunner:
    """A runner with weights drawn at random, but for the demo model."""
    sections = {
        "model": {"path": path, "load_format": "safetensors" if path == "demo" else "dummy", "tokenizer": "none"},
        "device": {"kind": device.type},
        "kv": {"num_pages": num_pages, "page_size": PAGE_SIZE},
        "scheduler": {"max_running": max_rows, "max_step_tokens": max_step_tokens},
        "graphs": {"mode": mode},
        "plugins": {"attention": attention},
    }
    system = System(build_config(Config(), sections))
    return load_runner(system.config, system.spec, system.max_len, system.engine.plugins, rank=0, progress=False)


def pages_each(context: int, room: int) -> int:
    """Pages of a row with so much context, the token that is decoded first, and ``room`` more."""
    return -(-(context + room + 1) // PAGE_SIZE)


class Stepping:
    """Rows that all have a context of so many tokens, and pages for ``room`` more.

    Raises ValueError if the pool has fewer pages: kernels would write past it without an error."""

    def __init__(self, runner: ModelRunner, num_rows: int, context: int, room: int, params: SamplingParams) -> None:
        self._runner = runner
        self._number = 0
        self._rows = _int32(np.arange(num_rows))
        pages_RP = np.arange(num_rows * pages_each(context, room)).reshape(num_rows, -1)
        prompt = np.zeros(context + 1, dtype=np.int32)
        for row in range(num_rows):
            # All but the last token counts as computed: what it attends to does not matter to the clock.
            admission = _admission(runner, row, prompt, context, pages_RP[row], params)
            self.launch(
                admissions=(admission,),
                prefill_rows=_int32([row]),
                prefill_starts=_int32([context]),
                prefill_lengths=_int32([1]),
                prefill_samples=_int32([1]),
            ).collect()

    def decode(self) -> LaunchedStep:
        """One more token for every row."""
        return self.launch(decode_rows=self._rows)

    def launch(self, **fields: Any) -> LaunchedStep:
        """The next step."""
        self._number += 1
        return self._runner.launch(Step(step_id=self._number, **fields))


def prefill(runner: ModelRunner, number: int, num_tokens: int) -> LaunchedStep:
    """A whole prompt in one step, on row 0 and the first pages."""
    pages = np.arange(-(-num_tokens // PAGE_SIZE))
    prompt = np.arange(num_tokens) % 100
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return runner.launch(
        Step(
            step_id=number,
            admissions=(_admission(runner, 0, prompt, 0, pages, params),),
            prefill_rows=_int32([0]),
            prefill_starts=_int32([0]),
            prefill_lengths=_int32([num_tokens]),
            prefill_samples=_int32([1]),
        )
    )


def _admission(
    runner: ModelRunner, row: int, prompt: np.ndarray, num_computed: int, pages: np.ndarray, params: SamplingParams
) -> Admission:
    if pages.max() >= runner.num_pages:
        raise ValueError(f"row {row} would have page {pages.max()} of a pool of {runner.num_pages}: load a larger pool")
    return Admission(
        row=row,
        token_ids=_int32(prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=num_computed,
        pages=_int32(pages),
        params=params,
    )


def _int32(numbers: Any) -> bytes:
    return np.asarray(numbers, dtype=np.int32).tobytes()
