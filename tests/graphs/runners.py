"""A runner driven step by step, as the scheduler would: rows with prompts, decode steps, pages appended when needed.

Owns: the pages that rows have, the steps' bytes.  Does not know: graphs.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.config import Config, build_config
from engine.control.system import System
from engine.execution.launched_step import LaunchedStep
from engine.execution.runner import ModelRunner
from engine.messages import Admission, Step
from engine.plugins.kinds import chosen_plugins
from engine.plugins.manager import Plugins
from engine.startup import loading
from engine.types.params import SamplingParams
from tests.models.checkpoints import random_tokens

PAGE_SIZE = 4
MAX_LEN = 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class OpenRunner(ModelRunner):
    """A runner that shows what it was built from: its arguments, by their names."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.parts = SimpleNamespace(**parts)


def load(
    checkpoint: Path,
    mode: str,
    max_running: int = 8,
    num_pages: int = 160,
    attention: str = "torch",
    num_ranks: int = 1,
    **graphs: object,
) -> OpenRunner:
    model = {"path": str(checkpoint), "tokenizer": "none", "dtype": "float32", "max_model_len": MAX_LEN}
    sections = {
        "model": model,
        "device": {"kind": "cpu", "tensor_parallel": num_ranks},
        "kv": {"page_size": PAGE_SIZE, "num_pages": num_pages},
        "scheduler": {"max_running": max_running, "max_step_tokens": 32},
        "graphs": {"mode": mode, **graphs},
        "plugins": {"attention": attention},
    }
    system = System(build_config(Config(), sections))
    plugins = Plugins(chosen_plugins(system.config))
    with patch.object(loading, "ModelRunner", OpenRunner):
        runner = loading.load_runner(system.config, system.spec, system.max_len, plugins, rank=0, progress=False)
    assert isinstance(runner, OpenRunner)
    return runner


class Steps:
    """Launches steps on a runner.  lengths: of each row, its prompt and what was sampled."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self._free = list(range(runner.num_pages))[::-1]
        self._number = 0

    def prefill(self, row: int, length: int, params: SamplingParams = GREEDY, seed: int = 0) -> LaunchedStep:
        """A prompt in one step, which samples its first token."""
        self._free += self.pages.pop(row, [])
        self.pages[row] = [self._free.pop() for _ in range(-(-length // PAGE_SIZE))]
        self.lengths[row] = length + 1
        prompt = int32(random_tokens(length, seed=seed or row + 1))
        return self._launch(
            admissions=(
                Admission(
                    row=row,
                    token_ids=prompt,
                    num_prompt_tokens=length,
                    num_computed_tokens=0,
                    pages=int32(self.pages[row]),
                    params=params,
                ),
            ),
            prefill_rows=int32([row]),
            prefill_starts=int32([0]),
            prefill_lengths=int32([length]),
            prefill_samples=int32([1]),
        )

    def decode(self, *rows: int) -> LaunchedStep:
        """A token for each of the rows, with the pages that they grow into."""
        appends = []
        for row in rows:
            if self.lengths[row] > len(self.pages[row]) * PAGE_SIZE:
                appends.append((row, len(self.pages[row]), self._free.pop()))
                self.pages[row].append(appends[-1][2])
            self.lengths[row] += 1
        columns = zip(*appends, strict=True) if appends else ((), (), ())
        names = ("table_rows", "table_indexes", "table_pages")
        pages = {name: int32(column) for name, column in zip(names, columns, strict=True)}
        return self._launch(decode_rows=int32(rows), **pages)

    def _launch(self, **fields: object) -> LaunchedStep:
        self._number += 1
        return self.runner.launch(Step(step_id=self._number, **fields))


def int32(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


def tokens(step: LaunchedStep) -> list[int]:
    """What a step has sampled."""
    return np.frombuffer(step.collect().token_ids, dtype=np.int32).tolist()
