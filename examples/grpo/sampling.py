"""Samplers of an example: a server that is disturbed, and an engine in this process.

An answer is its token ids and the log probability with which each of them was drawn.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from callboard import LLM, SamplingParams

Answer = tuple[list[int], list[float]]
CONFIG = """
[model]
path = "{model}"
dtype = "float32"
numerics = "invariant"
[kv]
num_pages = 1024
[plugins]
proposer = "ngram"
[placement]
executor = "process"
[storage]
folder = "{folder}"
[server]
operator_key = "{key}"
"""
KEY = "sk-trainer-of-this-example"
DRAWN_BY = SamplingParams(
    temperature=1.0, top_p=0.95, max_tokens=24, ignore_eos=True, logprobs=0, processed_logprobs=True
)


class Offline:
    """An engine in this process: the answers that every other way must give."""

    def __init__(self, model: Path, folder: Path) -> None:
        tables = {"model": {"dtype": "float32", "numerics": "invariant"}, "kv": {"num_pages": 1024}}
        self.weights = folder / "offline"
        self._engine = LLM(model, config=tables, progress=False)

    def sample(self, prompts: list[list[int]], seeds: list[int], disturb: bool) -> list[Answer]:
        """Return an answer to each prompt.  disturb: has no meaning here."""
        outputs = self._engine.generate(prompts, [DRAWN_BY.replace(seed=seed) for seed in seeds], progress=False)
        return [(one.token_ids, [entry.sampled.logprob for entry in one.logprobs]) for one in outputs]

    def update(self, folder: Path, version: str) -> None:
        """Sample with the weights of a checkpoint."""
        self._engine.weights.update(folder, version=version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._engine.close()


class Server:
    """``callboard serve`` in a process of its own, its executor in another one, with proposed tokens.

    Requests are paused while they run, and sometimes their executor is killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.weights = folder / "data" / "weights"
        self.weights.mkdir(parents=True)
        config = folder / "grpo.toml"
        config.write_text(CONFIG.format(model=model.resolve(), folder=folder / "data", key=KEY))
        command = [sys.executable, "-m", "callboard", "serve", str(config), "--port", "0", "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while (found := re.search(r"http://[\d.]+:\d+", line := self._process.stdout.readline())) is None:
            assert line, "the server did not start"
        self._url = found[0]

    def sample(self, prompts: list[list[int]], seeds: list[int], disturb: bool) -> list[Answer]:
        """Return an answer to each prompt.  disturb: kill the executor meanwhile."""
        return asyncio.run(self._sample(prompts, seeds, disturb))

    async def _sample(self, prompts: list[list[int]], seeds: list[int], disturb: bool) -> list[Answer]:
        async with self._session() as session, asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(session, *one)) for one in zip(prompts, seeds, strict=True)]
            await asyncio.sleep(0.02)
            await _post(session, "/pause?mode=keep", {})
            if disturb:
                self._kill_executor()
            await _post(session, "/resume", {})
            return [await task for task in tasks]

    def update(self, folder: Path, version: str) -> None:
        """Sample with the weights of a checkpoint."""
        asyncio.run(self._update(folder, version))

    async def _update(self, folder: Path, version: str) -> None:
        async with self._session() as session:
            await _post(session, "/update_weights", {"path": str(folder), "version": version})

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self._url, headers={"Authorization": f"Bearer {KEY}"})

    def _kill_executor(self) -> None:
        pid = self._process.pid
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if b"executor_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()


async def _answer(session: aiohttp.ClientSession, prompt: list[int], seed: int) -> Answer:
    asked = {"model": "demo_model", "prompt": prompt, "seed": seed, "return_token_ids": True}
    for name in ("temperature", "top_p", "max_tokens", "ignore_eos", "logprobs", "processed_logprobs"):
        asked[name] = getattr(DRAWN_BY, name)
    choice = (await _post(session, "/v1/completions", asked))["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()
