"""Precisions of callboard beside transformers: speed, memory, start and quality of one checkpoint, in turns.

Every engine is a process of its own that holds the checkpoint and is told over a pipe what to do next.  It is started
twice: first with empty caches, as on a new machine, then with what the first start has kept.  Times are the
process's CPU time, with one torch thread: where others use the machine as well, a clock says little.

Owns: the engines, the turns, the table.  Does not know: which checkpoints there are.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

LARGEST_ID = 2000
PROMPT_TOKENS, PREFILL_TOKENS = 16, 1024
Prompts = list[list[int]]
# name -> (engine, dtype, model.quantization)
ENGINES = {
    "transformers float32": ("transformers", "float32", "none"),
    "transformers bfloat16": ("transformers", "bfloat16", "none"),
    "callboard float32": ("callboard", "float32", "none"),
    "callboard bfloat16": ("callboard", "bfloat16", "none"),
    "callboard int8": ("callboard", "float32", "int8"),
}
FIRST = next(iter(ENGINES))


class Engine(Protocol):
    """In its own process."""

    def generate(self, prompts: Prompts, num_new: int) -> None:
        """Greedy, exactly so many tokens after each prompt."""
        ...

    def perplexity(self, texts: list[str]) -> float:
        """Of all tokens but the first of each text."""
        ...


class Callboard:
    """The whole engine, offline."""

    def __init__(self, directory: str, dtype: str, quantization: str) -> None:
        from callboard import LLM, SamplingParams

        self._params = SamplingParams
        config = {
            "model": {"dtype": dtype, "quantization": quantization},
            "device": {"kind": "cpu", "threads": 1},
            "kv": {"num_pages": 1024},
        }
        self._llm = LLM(directory, progress=False, config=config)

    def generate(self, prompts: Prompts, num_new: int) -> None:
        """See ``Engine``."""
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        self._llm.generate(prompts, params, progress=False)

    def perplexity(self, texts: list[str]) -> float:
        """See ``Engine``."""
        params = self._params(max_tokens=1, prompt_logprobs=0, temperature=0)
        deltas = [delta for text in texts for delta in self._llm.stream(text, params)]
        scored = (one for delta in deltas for one in delta.prompt_logprobs[1:])
        return math.exp(-statistics.fmean(one.sampled.logprob for one in scored))


class Transformers:
    """``generate`` with a static batch of equal lengths, which is the best case for it."""

    def __init__(self, directory: str, dtype: str, quantization: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        assert quantization == "none", "transformers is compared in the types of checkpoints"
        torch.set_num_threads(1)
        self._torch = torch
        self._directory = directory
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: Prompts, num_new: int) -> None:
        """See ``Engine``."""
        ids = self._torch.tensor(prompts)
        wanted = {"do_sample": False, "min_new_tokens": num_new, "max_new_tokens": num_new, "pad_token_id": 0}
        with self._torch.inference_mode():
            self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **wanted)

    def perplexity(self, texts: list[str]) -> float:
        """See ``Engine``."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._directory)
        found: list[float] = []
        with self._torch.inference_mode():
            for text in texts:
                ids = self._torch.tensor([tokenizer(text)["input_ids"]])
                logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
                found += logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return math.exp(-statistics.fmean(found))


def serve(directory: str, name: str) -> None:
    """A process of ``ENGINES``: one line of JSON in, one out, until the pipe ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    kind, dtype, quantization = ENGINES[name]
    engine: Engine = (Callboard if kind == "callboard" else Transformers)(directory, dtype, quantization)
    engine.generate([[1, 2, 3]], 1)
    answers.write(f"{time.process_time()}\n")
    answers.flush()
    for line in sys.stdin:
        told = json.loads(line)
        start = time.process_time()
        result: float = 0.0
        if "texts" in told:
            result = engine.perplexity(told["texts"])
        elif "prompts" in told:
            engine.generate(told["prompts"], told["new"])
            result = time.process_time() - start
        else:
            fields = dict(one.split(":", 1) for one in Path("/proc/self/status").read_text().splitlines())
            result = int(fields["VmRSS"].split()[0]) / 1024
        answers.write(json.dumps(result) + "\n")
        answers.flush()


class Running:
    """An engine's process, seen from here.  start_s: its CPU time until it had generated a token."""

    def __init__(self, directory: Path, name: str, cache: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(directory), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"},
        )
        self.start_s = float(self._answer())

    def ask(self, **what: object) -> float:
        """Its answer to a line of ``serve``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(directory: Path, batches: list[int], num_new: int, turns: int, texts: list[str]) -> list[dict[str, Any]]:
    """A row for each engine: tokens per CPU second, and how many times those of the first in the same turn.

    texts: to be scored; empty for random weights."""
    rows: list[dict[str, Any]] = []
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as caches:
        try:
            for name in ENGINES:
                cache = str(Path(caches) / name.replace(" ", "_"))
                first = Running(directory, name, cache)
                first.close()
                running.append(Running(directory, name, cache))
                rows.append({"engine": name, "first_start_s": first.start_s, "start_s": running[-1].start_s})
            for row, engine in zip(rows, running, strict=True):
                row["loaded_mb"] = engine.ask()
            loads = [(f"{batch} at once", batch, PROMPT_TOKENS, num_new) for batch in batches]
            for what, batch, num_prompt, new in [*loads, (f"a prompt of {PREFILL_TOKENS}", 1, PREFILL_TOKENS, 1)]:
                counted = batch * new if new > 1 else num_prompt
                rates = _in_turns(running, what, batch, num_prompt, new, turns)
                for row, mine in zip(rows, rates, strict=True):
                    row[what] = counted * statistics.median(mine)
                    row[f"{what}, x"] = statistics.median(
                        one / other for one, other in zip(mine, rates[0], strict=True)
                    )
            for row, engine in zip(rows, running, strict=True):
                row["resident_mb"] = engine.ask()
                if texts:
                    row["perplexity"] = engine.ask(texts=texts)
        finally:
            for engine in running:
                engine.close()
    return rows


def _in_turns(
    running: list[Running], what: str, batch: int, num_prompt: int, num_new: int, turns: int
) -> list[list[float]]:
    """Per engine, how often a CPU second holds the work.  Prompts are new, so none is cached; a turn warms up."""
    rates: list[list[float]] = [[] for _ in running]
    for turn in range(turns + 1):
        dice = Random(f"{what} {turn}")
        prompts = [[dice.randrange(10, LARGEST_ID) for _ in range(num_prompt)] for _ in range(batch)]
        for engine, mine in zip(running, rates, strict=True):
            seconds = engine.ask(prompts=prompts, new=num_new if turn else min(2, num_new))
            if turn:
                mine.append(1 / seconds)
    return rates


def show(model: str, rows: list[dict[str, Any]]) -> None:
    """As a table for a terminal."""
    shown = [name for name in rows[0] if not name.endswith(", x")]
    title = f"{model}: tokens per CPU second (times {FIRST}), one thread"
    table = Table(*shown, title=title, padding=(0, 1))
    for row in rows:
        cells = (_cell(row, name) for name in shown)
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    return f"{value:.4g} ({row[f'{name}, x']:.2f})" if f"{name}, x" in row else f"{value:.4g}"


def plot(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Bars of how many times the tokens per second of the first engine each has, by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(6 * len(tables), 4), squeeze=False)
    for axis, (model, rows) in zip(axes[0], tables.items(), strict=True):
        loads = [name.removesuffix(", x") for name in rows[0] if name.endswith(", x")]
        width = 0.8 / len(rows)
        for number, row in enumerate(rows):
            places = [at + number * width for at in range(len(loads))]
            axis.bar(places, [row[f"{load}, x"] for load in loads], width, label=row["engine"])
        axis.set_xticks([at + 0.4 - width / 2 for at in range(len(loads))], loads, rotation=15)
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.set_title(model)
        axis.set_ylabel(f"tokens/s, times {FIRST}")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(
    models: dict[str, tuple[Path | Callable[[Path], None], int, int, list[str]]], batches: list[int]
) -> dict[str, list[dict[str, Any]]]:
    """models: by name, a directory or what writes one, new tokens, turns, texts to be scored.  Prints each table."""
    tables = {}
    for model, (source, num_new, turns, texts) in models.items():
        with tempfile.TemporaryDirectory() as written:
            directory = source if isinstance(source, Path) else Path(written)
            if not isinstance(source, Path):
                source(directory)
            tables[model] = measure(directory, batches, num_new, turns, texts)
        show(model, tables[model])
    return tables


if __name__ == "__main__":
    serve(*sys.argv[1:])
