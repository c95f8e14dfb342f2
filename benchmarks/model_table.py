"""Precisions of callboard beside transformers and llama.cpp: speed, memory, start, quality of one checkpoint, in turns.

Every engine is a process of its own that holds the checkpoint and reads over a pipe what to do next.  It is started
twice: first with empty caches, as on a new machine, then with what the first start has kept.  All compute with the same
number of threads.  Times are CPU time, of all threads of the process that has the weights, and beside it the clock's:
where others use the machine as well, that says little.  With several threads the ratios are of the clock's, as threads
take CPU time while they wait for each other.

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

import llama_files
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from server.extensions.bench import llama_cpp

LARGEST_ID = 2000
PROMPT_TOKENS, PREFILL_TOKENS = 16, 1024
LIKELY = 64
Prompts = list[list[int]]
# name -> (engine, dtype, model.quantization)
ENGINES = {
    "transformers float32": ("transformers", "float32", "none"),
    "transformers bfloat16": ("transformers", "bfloat16", "none"),
    "callboard float32": ("callboard", "float32", "none"),
    "callboard bfloat16": ("callboard", "bfloat16", "none"),
    "callboard int8": ("callboard", "float32", "int8"),
    "llama.cpp float32": ("llama.cpp", "F32", "none"),
    "llama.cpp Q8_0": ("llama.cpp", "Q8_0", "none"),
    "llama.cpp Q4_0": ("llama.cpp", "Q4_0", "none"),
}


class Engine(Protocol):
    """An engine in a process of its own."""

    def generate(self, prompts: Prompts, num_new: int) -> None:
        """Greedy, exactly so many tokens after each prompt."""
        ...

    def perplexity(self, texts: list[str]) -> float:
        """Return the perplexity of all tokens but the first of each text."""
        ...

    def cpu_s(self) -> float:
        """CPU time until now of the process that computes."""
        ...

    @property
    def pid(self) -> int:
        """The number of that process."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


class InThisProcess:
    """An engine that has the weights in this process."""

    pid = os.getpid()

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        """End nothing."""


class Callboard(InThisProcess):
    """The whole engine, offline."""

    def __init__(self, directory: str, dtype: str, quantization: str, threads: int) -> None:
        from callboard import LLM, SamplingParams

        self._params = SamplingParams
        config = {
            "model": {"dtype": dtype, "quantization": quantization},
            "device": {"kind": "cpu", "threads": threads},
            "kv": {"num_pages": 1024},
        }
        self._llm = LLM(directory, progress=False, config=config)

    def generate(self, prompts: Prompts, num_new: int) -> None:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        self._llm.generate(prompts, params, progress=False)

    def perplexity(self, texts: list[str]) -> float:
        params = self._params(max_tokens=1, prompt_logprobs=0, temperature=0)
        deltas = [delta for text in texts for delta in self._llm.stream(text, params)]
        scored = (one for delta in deltas for one in delta.prompt_logprobs[1:])
        return math.exp(-statistics.fmean(one.sampled.logprob for one in scored))


class Transformers(InThisProcess):
    """``generate`` with a static batch of equal lengths, which is the best case for it."""

    def __init__(self, directory: str, dtype: str, quantization: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        assert quantization == "none", "transformers is compared in the types of checkpoints"
        torch.set_num_threads(threads)
        self._torch = torch
        self._directory = directory
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: Prompts, num_new: int) -> None:
        ids = self._torch.tensor(prompts)
        wanted = {"do_sample": False, "min_new_tokens": num_new, "max_new_tokens": num_new, "pad_token_id": 0}
        with self._torch.inference_mode():
            self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **wanted)

    def perplexity(self, texts: list[str]) -> float:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._directory)
        found: list[float] = []
        with self._torch.inference_mode():
            for text in texts:
                ids = self._torch.tensor([tokenizer(text)["input_ids"]])
                logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
                found += logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return math.exp(-statistics.fmean(found))


class Llama:
    """A server of llama.cpp, with as many slots as prompts, each just large enough: begun anew when that changes."""

    def __init__(self, directory: str, kind: str, quantization: str, threads: int, *command: str) -> None:
        assert quantization == "none", "what llama.cpp rounds to is the kind of its file"
        self._command, self._threads = list(command), threads
        self._vocab_size = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
        self._path = Path(os.environ["XDG_CACHE_HOME"]) / f"{kind}.gguf"
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            llama_files.write_gguf(Path(directory), self._path, kind)
        self._shape = (1, 256)
        self._server = llama_cpp.LlamaServer(self._command, self._path, *self._shape, threads)

    @property
    def pid(self) -> int:
        return self._server.pid

    def cpu_s(self) -> float:
        return self._server.cpu_s()

    def generate(self, prompts: Prompts, num_new: int) -> None:
        self._fit(len(prompts), len(prompts[0]) + num_new)
        answers = self._server.complete(prompts, num_new)
        assert [one["tokens_predicted"] for one in answers] == [num_new] * len(prompts)

    def perplexity(self, texts: list[str]) -> float:
        """Return the perplexity.

        The server scores what it may say next, so each token takes a request for what follows those before; its answer
        is long if it holds all tokens, and most are among the likely ones."""
        found: list[float] = []
        for text in texts:
            ids = self._server.tokens(text)
            self._fit(1, len(ids))
            for end in range(1, len(ids)):
                likely = self._next_logprobs(ids[:end], LIKELY)
                if ids[end] not in likely:
                    likely = self._next_logprobs(ids[:end], self._vocab_size)
                found.append(likely[ids[end]])
        return math.exp(-statistics.fmean(found))

    def close(self) -> None:
        self._server.close()

    def _next_logprobs(self, ids: list[int], count: int) -> dict[int, float]:
        (answer,) = self._server.complete([ids], 1, cache_prompt=True, n_probs=count)
        return {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}

    def _fit(self, slots: int, slot_tokens: int) -> None:
        shape = (slots, -(-slot_tokens // 256) * 256)
        if shape != self._shape:
            self._server.close()
            self._server = llama_cpp.LlamaServer(self._command, self._path, *shape, self._threads)
            self._shape = shape


KINDS = {"callboard": Callboard, "transformers": Transformers, "llama.cpp": Llama}


def serve(directory: str, name: str, threads: str, *command: str) -> None:
    """A process of ``ENGINES``: one line of JSON in, one out, until the pipe ends.  command: what runs llama.cpp."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    kind, dtype, quantization = ENGINES[name]
    began = time.perf_counter()
    more = command if kind == "llama.cpp" else ()
    engine: Engine = KINDS[kind](directory, dtype, quantization, int(threads), *more)
    engine.generate([[1, 2, 3]], 1)
    answers.write(f"{json.dumps([engine.cpu_s(), time.perf_counter() - began])}\n")
    answers.flush()
    for line in sys.stdin:
        told = json.loads(line)
        result: float | tuple[float, float] = 0.0
        if "texts" in told:
            result = engine.perplexity(told["texts"])
        elif "prompts" in told:
            start, clock = engine.cpu_s(), time.perf_counter()
            engine.generate(told["prompts"], told["new"])
            result = (engine.cpu_s() - start, time.perf_counter() - clock)
        else:
            fields = dict(one.split(":", 1) for one in Path(f"/proc/{engine.pid}/status").read_text().splitlines())
            result = int(fields["VmRSS"].split()[0]) / 1024
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    engine.close()


class Running:
    """An engine's process, seen from here.

    start_s, start_wall_s: CPU time and seconds of the clock until it had generated a token."""

    def __init__(self, directory: Path, name: str, threads: int, cache: str, llama: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(directory), name, str(threads), *llama],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"},
        )
        self.start_s, self.start_wall_s = self._answer()

    def ask(self, **what: object) -> Any:
        """Return its answer to a line of ``serve``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def measure(
    directory: Path,
    engines: list[str],
    batches: list[int],
    num_new: int,
    turns: int,
    texts: list[str],
    llama: list[str],
    threads: int,
) -> list[dict[str, Any]]:
    """A row for each engine: tokens per CPU second, how many times those of the first in the same turn, and per second.
    With several threads the times are of tokens per second.

    texts: to be scored; empty for random weights.  llama: what runs llama.cpp; empty to do without."""
    engines = [name for name in engines if llama or not name.startswith("llama.cpp")]
    compared = 0 if threads == 1 else 1
    rows: list[dict[str, Any]] = []
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as caches:
        try:
            for name in tqdm(engines, desc="start", leave=False):
                cache = str(Path(caches) / name.replace(" ", "_"))
                first = Running(directory, name, threads, cache, llama)
                first.close()
                running.append(Running(directory, name, threads, cache, llama))
                row = {"engine": name, "first_start_s": first.start_s, "start_s": running[-1].start_s}
                rows.append(row | {"start_s, wall": running[-1].start_wall_s})
            for row, engine in zip(rows, running, strict=True):
                row["loaded_mb"] = engine.ask()
            loads = [(f"{batch} at once", batch, PROMPT_TOKENS, num_new) for batch in batches]
            for what, batch, num_prompt, new in [*loads, (f"a prompt of {PREFILL_TOKENS}", 1, PREFILL_TOKENS, 1)]:
                counted = batch * new if new > 1 else num_prompt
                rates = _in_turns(running, what, batch, num_prompt, new, turns)
                for row, mine in zip(rows, rates, strict=True):
                    row[what] = counted * statistics.median(cpu for cpu, _ in mine)
                    row[f"{what}, x"] = statistics.median(
                        one[compared] / other[compared] for one, other in zip(mine, rates[0], strict=True)
                    )
                    row[f"{what}, wall"] = counted * statistics.median(wall for _, wall in mine)
            for row, engine in tqdm(list(zip(rows, running, strict=True)), desc="perplexity", leave=False):
                row["resident_mb"] = engine.ask()
                if texts:
                    row["perplexity"] = engine.ask(texts=texts)
        finally:
            for engine in running:
                engine.close()
    return rows


def _in_turns(
    running: list[Running], what: str, batch: int, num_prompt: int, num_new: int, turns: int
) -> list[list[tuple[float, float]]]:
    """Per engine, how often a CPU second, and one of the clock, holds the work.

    Prompts are new, so none is cached; a turn warms up."""
    rates: list[list[tuple[float, float]]] = [[] for _ in running]
    for turn in tqdm(range(turns + 1), desc=what, leave=False):
        dice = Random(f"{what} {turn}")
        prompts = [[dice.randrange(10, LARGEST_ID) for _ in range(num_prompt)] for _ in range(batch)]
        for engine, mine in zip(running, rates, strict=True):
            cpu_s, wall_s = engine.ask(prompts=prompts, new=num_new if turn else min(2, num_new))
            if turn:
                mine.append((1 / cpu_s, 1 / wall_s))
    return rates


def show(model: str, rows: list[dict[str, Any]], threads: int) -> None:
    """Print a table for a terminal."""
    shown = [name for name in rows[0] if not name.endswith((", x", ", wall"))]
    title = f"{model}: tokens per CPU second (times {rows[0]['engine']}; per second of the clock), threads: {threads}"
    table = Table(*shown, title=title, padding=(0, 1))
    for row in rows:
        cells = (_cell(row, name) for name in shown)
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    beside = f" ({row[f'{name}, x']:.2f}; {row[f'{name}, wall']:.4g})" if f"{name}, x" in row else ""
    return f"{value:.4g}{beside}"


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
        axis.set_ylabel(f"tokens/s, times {rows[0]['engine']}")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(
    models: dict[str, tuple[Path | Callable[[Path], None], int, int, list[str]]],
    engines: list[str],
    batches: list[int],
    llama: list[str],
    threads: int,
) -> dict[str, list[dict[str, Any]]]:
    """Measure models.  models: by name, a directory or what writes one, new tokens, turns, texts to be scored.
    engines: of ``ENGINES``, all at the same time; the others are compared with the first.  llama: what runs llama.cpp,
    for models whose file it can have.  Prints each table."""
    Console().print(f"llama.cpp: {' '.join(llama) or 'not found'}")
    tables = {}
    for model, (source, num_new, turns, texts) in models.items():
        with tempfile.TemporaryDirectory() as written:
            directory = source if isinstance(source, Path) else Path(written)
            if not isinstance(source, Path):
                source(directory)
            served = llama if llama_files.can_write(directory) else []
            tables[model] = measure(directory, engines, batches, num_new, turns, texts, served, threads)
        show(model, tables[model], threads)
    return tables


if __name__ == "__main__":
    serve(*sys.argv[1:])
