"""The server of llama.cpp as a process, for comparisons.

The server is a ``llama-server``, or the one in the wheel ``xllamacpp``, which another interpreter may have.
Owns: the process, its arguments, requests of its own protocol.  Does not know: what is compared.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from engine.types.errors import ConfigError
from server.extensions.bench.server_process import ServerProcess


def find(binary: str, python: str) -> list[str]:
    """Return the command that serves with llama.cpp; empty if there is none.

    binary: a ``llama-server``, "" for the one on the PATH.  python: an interpreter that may have ``xllamacpp``.
    Raises ConfigError for a program that is not there."""
    if found := shutil.which(binary or "llama-server"):
        return [found]
    for program in (binary, python):
        if program and shutil.which(program) is None:
            raise ConfigError(f"{program}: is no program that can be run")
    looked = subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=False)
    return [python, str(Path(__file__).with_name("xllamacpp_server.py").resolve())] if looked.returncode == 0 else []


class LlamaServer(ServerProcess):
    """A server with so many slots of so many tokens each; it is ready when this returns.

    Raises CallboardError if it ends before."""

    def __init__(self, command: list[str], path: Path, slots: int, slot_tokens: int, threads: int) -> None:
        told = ["-m", str(path), "-c", str(slots * slot_tokens), "-np", str(slots)]
        told += ["-t", str(threads), "-tb", str(threads)]
        told += [
            "--threads-http",
            str(slots + 2),
            "--cache-ram",
            "0",
            "--no-kv-unified",
            "--host",
            "127.0.0.1",
            "--port",
        ]
        super().__init__([*command, *told], "/health")

    def complete(self, prompts: list[list[int]], num_new: int, **more: object) -> list[dict[str, Any]]:
        """Return exactly so many tokens after each prompt, the likeliest ones; nothing is kept for later calls."""
        asked = {
            "prompt": prompts,
            "n_predict": num_new,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._post("/completion", asked | more)
        return answer if isinstance(answer, list) else [answer]

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, by the file's tokenizer."""
        return list(self._post("/tokenize", {"content": text})["tokens"])

    def _post(self, route: str, body: dict[str, object]) -> Any:
        content = {"Content-Type": "application/json"}
        request = Request(self.url + route, json.dumps(body).encode(), content)  # noqa: S310 - http, of this machine
        with urlopen(request) as answer:  # noqa: S310
            return json.load(answer)
