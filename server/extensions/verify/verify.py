"""``callboard verify numerics``: mixed requests in many ways, whose tokens and log probabilities must agree to the bit.

Owns: the requests, the ways, the digest.  Does not know: why bits could differ.
"""

import argparse
import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import Config, build_config
from engine.llm import LLM, Completion
from engine.types.errors import CallboardError, ConfigError
from engine.types.params import Grammar, SamplingParams

MOST_REQUESTS = 200
LEAST_REQUESTS = 10  # the first so many have every kind of request, and do not fit FEW_PAGES together
FIRST_WAY_S = 8.0  # all ways together take about ten times as long
NUM_TOKENS = 40
PAGE_TOKENS = 16
MAX_LEN = 512
# So few pages that some requests wait for those of others, and prefixes are evicted; the longest one fits.
FEW_PAGES = MAX_LEN // PAGE_TOKENS
NUM_KILLS = 5
KILL_AFTER_S = 0.5  # of each executor's first answer
WORDS = ("import os", "def read(path):", "with open(path) as file:", "return file.read()", "class Node:", "pass")
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}}}'

Request = tuple[str, SamplingParams]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run all requests.  tables: of the configuration, beside what all ways share.

    alone: one after the other.  again: so often, the last time counts, with prompts that are cached.
    kills: how many times the executor is killed meanwhile.  if_possible: left out where the model does not allow it."""

    name: str
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alone: bool = False
    again: int = 1
    kills: int = 0
    if_possible: bool = False


PROCESS = {"executor": "process", "max_restarts": 100}
WAYS = (
    Way("alone", alone=True),
    Way("together"),
    Way("together, prompts cached", again=2),
    Way("in chunks of 32", {"scheduler": {"prefill_chunk": 32, "max_step_tokens": 64}}),
    Way("with few pages", {"kv": {"num_pages": FEW_PAGES}, "scheduler": {"max_running": 64}}),
    Way("pages back from the host", {"kv": {"num_pages": FEW_PAGES, "num_host_pages": 512}}, again=2),
    Way("in a process, killed and recomputed", {"placement": PROCESS}, kills=NUM_KILLS),
    Way("with speculation", {"plugins": {"proposer": "ngram"}}),
    Way("with 2 threads", {"device": {"threads": 2}}),
    Way("over 2 ranks", {"device": {"tensor_parallel": 2}}, if_possible=True),
    Way("over 4 ranks", {"device": {"tensor_parallel": 4}}, if_possible=True),
)


def mixed_requests(number: int) -> list[Request]:
    """Greedy, seeded and constrained ones, with penalties and log probabilities; some prompts are shared."""
    requests = []
    for index in range(number):
        prompt = index // 2 if index % 4 < 2 else index  # every other pair asks the same, as n=2 does
        words = [WORDS[(prompt * 7 + place * place) % len(WORDS)] for place in range(1 + prompt * 13 % 41)]
        shared = WORDS * 9 if prompt % 3 == 0 else ()
        drawn: dict[str, Any] = {"temperature": 0.8, "seed": index + 1} if index % 2 else {"temperature": 0.0}
        drawn |= {"top_p": 0.9} if index % 4 == 1 else {"repetition_penalty": 1.1} if index % 8 == 3 else {}
        drawn |= {"grammar": Grammar("json_schema", SCHEMA)} if index % 10 == 9 else {"ignore_eos": index % 3 > 0}
        requests.append(
            (" ".join((*shared, *words)), SamplingParams(max_tokens=8 + index * 11 % NUM_TOKENS, logprobs=4, **drawn))
        )
    return requests


def digest(completions: Sequence[Completion]) -> str:
    """SHA-256 of every request's tokens and of the bits of all its log probabilities."""
    found = hashlib.sha256()
    for one in completions:
        found.update(np.array(one.token_ids, dtype=np.int64).tobytes())
        for token in one.logprobs:
            shown = (token.sampled, *token.top)
            found.update(np.array([each.token_id for each in shown], dtype=np.int64).tobytes())
            found.update(np.array([each.logprob for each in shown], dtype=np.float32).tobytes())
    return found.hexdigest()


def run(config: Config, way: Way, requests: Sequence[Request], limit_s: float = math.inf) -> list[Completion]:
    """Returns what the requests get in this way.  limit_s: from then on no further one is begun, if they run alone and
    as many as are needed have ended."""
    base = build_config(config, {"kv": {"page_size": PAGE_TOKENS}, "model": {"max_model_len": MAX_LEN}})
    prompts, params = [prompt for prompt, _ in requests], [one for _, one in requests]
    with LLM(config=build_config(base, way.tables), progress=False) as llm, Killer(way.kills):
        for _ in range(way.again):
            if way.alone:
                began = time.perf_counter()
                found = list[Completion]()
                for prompt, one in requests:
                    if len(found) >= LEAST_REQUESTS and time.perf_counter() - began > limit_s:
                        break
                    found += llm.generate(prompt, one)
            else:
                found = llm.generate(prompts, params)
    return found


class Killer:
    """While it is entered, kills this process's executors, each some time after it has come up.  Linux only."""

    def __init__(self, kills: int) -> None:
        self._kills = kills
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def __enter__(self) -> None:
        if self._kills:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._kills:
            self._thread.join()

    def _run(self) -> None:
        killed = set[int]()
        while len(killed) < self._kills and not self._over.wait(KILL_AFTER_S):
            for pid in _executors() - killed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)


def _executors() -> set[int]:
    """Children of this process that are executors."""
    found = set[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, path.read_text().split()):
                if b"executor_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


def verify(parsed: argparse.Namespace, config: Config) -> None:
    """Run the command, of which numerics are the only subject."""
    verify_numerics(config, WAYS, number=parsed.requests)


def verify_numerics(config: Config, ways: Sequence[Way], number: int | None = None) -> None:
    """Print a table of digests; raise CallboardError if they are not all the same.

    number: of requests; None for as many as the first way has time for."""
    config = build_config(config, {"model": {"numerics": "invariant"}})
    table = Table("requests", "seconds", "SHA-256 of tokens and log probabilities begins")
    digests: dict[str, str] = {}
    requests, limit_s = mixed_requests(number or MOST_REQUESTS), math.inf if number else FIRST_WAY_S
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(ways))
        for way in ways:
            progress.update(task, description=way.name)
            start = time.perf_counter()
            try:
                found = run(config, way, requests, limit_s)
            except ConfigError as error:
                if not way.if_possible:
                    raise
                table.add_row(f"{len(requests)} {way.name}", "", f"left out: {error}")
            else:
                requests, limit_s = requests[: len(found)], math.inf
                digests[way.name] = digest(found)
                seconds = f"{time.perf_counter() - start:.1f}"
                table.add_row(f"{len(requests)} {way.name}", seconds, digests[way.name][:24])
            progress.advance(task)
    console = Console()
    console.print(table)
    expected = digests[ways[0].name]
    if differing := [name for name, one in digests.items() if one != expected]:
        raise CallboardError(f"other bits than {ways[0].name}: {'; '.join(differing)}")
    console.print(f"{len(requests)} requests have the same bits in each of {len(digests)} ways.")
