"""Requests whose every number, id and list is at its edge or past it, over HTTP and from Python, in every placement.

    python -m tests.server.edges --requests 10000

A healthy stream runs beside them all the time and must say the same each time.  Whatever is asked, the answer is a
result or an error that says it is the client's (4xx); nothing is left open, no executor is restarted and nothing is
logged as an error.  The command prints a line a placement, and ends with 1 if anything of this is not so.

Owns: what is asked, what an answer may be.  Does not know: how a server is started.
"""

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from engine.llm import LLM
from engine.types.errors import RequestError
from engine.types.params import Grammar, SamplingParams
from tests.pace import far
from tests.server.http_client import as_operator
from tests.workers.server import MODEL, ROOT, Server

MAX_LEN = 96
VOCAB = 3072
NUM_CLIENTS = 16
HEALTHY = {
    **{"model": MODEL, "prompt": "def add(a, b):\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    "priority": -(1 << 31),  # so that it is served often, beside thousands of others
}
SETTINGS = (f"model.max_model_len={MAX_LEN}", "scheduler.max_running=16", "kv.num_pages=256")
PLACEMENTS = {
    "inline": ("placement.executor=inline",),
    "executor": ("placement.executor=process",),
    "all": ("placement.executor=process", "placement.tokenizers=2", "placement.ingress=process"),
}

INTEGERS = sorted(
    {
        edge + beside
        for edge in (0, 16, 20, 128, 1024, 3072, 1 << 16, 1 << 30, 1 << 31, 1 << 63)
        for beside in (-1, 0, 1)
    }
    | {-2, 2, -(1 << 31) - 1, -(1 << 31), -(1 << 63) - 1, -(1 << 63), (1 << 53) + 1, 1 << 64, 10**30, MAX_LEN}
)
REALS = (
    *(0.0, -0.0, 5e-324, -5e-324, 1e-45, 1e-40, 1e-7, 0.0099, 0.01, 0.5, 0.9999999, 1.0, 1.0000001, 2.0, 2.0001, -2.0),
    *(-2.0001, -1.0, 10.0, 10.001, 99.9, 100.0, 100.001, -100.0, -100.001, 1e38, 1e39, 1.7e308, -1.7e308),
)
TEXTS = (
    "",
    " ",
    "a",
    "\0",
    "\n" * 20,
    "a" * 1023,
    "a" * 1024,
    "a" * 1025,
    "ж" * 700,
    "🦉" * 300,
    "<|endoftext|>",
    "\ufffd",
)
LENGTHS = (0, 1, 2, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025)
OTHERS = (None, True, "x", {}, [], [[]], [None], 1.5, {"a": None}, [[[1]]])
PATTERNS = ("", "a", "a{0}", "a{3}", "(", "a{5,2}", "[a-", "\\", "(?=a)", ".*", "a|" * 50 + "a", "a{1000000}")
SCHEMAS = ({}, True, False, {"type": "integer"}, {"enum": []}, {"type": "nothing"}, {"minLength": -1}, {"$ref": "#/x"})

INTEGER_FIELDS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "priority")
REAL_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FLAGS = ("ignore_eos", "stream", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids")


class Dice:
    """Draws requests; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def one(self, values: Any) -> Any:
        return self.rng.choice(values)

    def ids(self) -> list[int]:
        edges = [0, 1, VOCAB - 2, VOCAB - 1] if self.rng.random() < 0.6 else INTEGERS
        length = self.one((1, 2, MAX_LEN - 2, MAX_LEN - 1, MAX_LEN, MAX_LEN + 1, *LENGTHS))
        return [self.one(edges) for _ in range(length)]

    def prompt(self) -> Any:
        kind = self.rng.randrange(12)
        if kind > 5:  # one that is right, so that the rest of the request is looked at
            return [self.one((0, 1, VOCAB - 2, VOCAB - 1)) for _ in range(self.one((1, 2, 15, 16, 17, MAX_LEN - 4)))]
        if kind == 0:
            return self.one(TEXTS) * self.one((1, 1, 1, 7))
        if kind == 1:
            return [self.one(TEXTS) for _ in range(self.one((0, 1, 2, 127, 128, 129)))]
        if kind == 2:
            return [self.ids() for _ in range(self.one((0, 1, 2, 3)))]
        return self.ids() if kind < 5 else self.one(OTHERS)

    def sampling(self) -> dict[str, Any]:
        """Up to four fields of those that every way in shares."""
        fields: dict[str, Any] = {"max_tokens": self.one((1, 2, 3))}
        for _ in range(self.rng.randint(0, 3)):
            kind = self.rng.randrange(8)
            if kind == 0:
                fields[self.one(INTEGER_FIELDS)] = self.one((self.one(INTEGERS), 0, 1, 2, 16, 20))
            elif kind == 1:
                fields[self.one(REAL_FIELDS)] = self.one((self.one(REALS), self.one((0.01, 5e-324, 0.5, 1.0, 2.0))))
            elif kind == 2:
                fields[self.one(FLAGS)] = self.one((True, False, None))
            elif kind == 3:
                fields["stop_token_ids"] = self.one((self.ids(), [0, VOCAB - 1]))
            elif kind == 4:
                count = self.one((0, 1, 2, 1023, 1024, 1025))
                fields["logit_bias"] = {
                    str(self.one(INTEGERS) if count < 3 else at): self.one(REALS) for at in range(count)
                }
            elif kind == 5:
                fields["stop"] = self.one(
                    (self.one(TEXTS), [self.one(TEXTS) for _ in range(self.one((0, 1, 15, 16, 17)))])
                )
            elif kind == 6:
                fields[self.one((*INTEGER_FIELDS, *REAL_FIELDS, *FLAGS, "stop", "stop_token_ids", "logit_bias"))] = (
                    self.one(OTHERS)
                )
            else:
                fields[self.one(REAL_FIELDS)] = self.one((0, 1, 2, 100, *INTEGERS))
        return fields

    def constraint(self) -> dict[str, Any]:
        if self.rng.random() < 0.8:
            return {}
        return self.one(
            (
                {"guided_regex": self.one(PATTERNS)},
                {"guided_json": self.one(SCHEMAS)},
                {"guided_choice": [self.one(TEXTS) for _ in range(self.one((0, 1, 2, 128)))]},
                {"guided_grammar": self.one(("root ::= ", 'root ::= "a"', "", "start: x"))},
                {"response_format": {"type": "json_schema", "json_schema": {"schema": self.one(SCHEMAS)}}},
                {"allowed_token_ids": self.one((self.ids(), [0, VOCAB - 1], self.one(OTHERS)))},
                {"bad_words": [self.one(TEXTS) for _ in range(self.one((0, 1, 2, 128, 129)))]},
                {
                    "response_format": {
                        "type": "structural_tag",
                        "triggers": [self.one(("<", "a", ""))],
                        "structures": [{"begin": "<f", "schema": self.one(SCHEMAS), "end": self.one((">", ""))}],
                    }
                },
                {"structured_outputs": {self.one(("regex", "choice", "grammar", "json")): self.one(OTHERS)}},
            )
        )

    def http(self) -> tuple[str, dict[str, Any]]:
        """(path, body)."""
        path = self.one(
            ("/v1/completions",) * 4 + ("/v1/chat/completions",) * 3
            + ("/generate", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
        )  # fmt: skip
        fields = self.sampling()
        number = self.one(INTEGERS)
        if path == "/v1/completions":
            extra = {self.one(("logprobs", "best_of", "prompt_logprobs", "truncate_prompt_tokens")): number}
            body = {"prompt": self.prompt(), "echo": self.one((True, False)), **fields, **self.constraint()}
            return path, {"model": MODEL, **body, **(extra if self.rng.random() < 0.3 else {})}
        if path == "/v1/chat/completions":
            turns = [
                {
                    "role": self.one(("user", "user", "user", "assistant", "system", "tool", "x")),
                    "content": self.one((*TEXTS, self.one(OTHERS))),
                }
                for _ in range(self.one((0, 1, 1, 1, 2, 9)))
            ]
            body = {"messages": turns, **fields, **self.constraint()}
            if self.rng.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": number}
            if self.rng.random() < 0.2:
                tool = {
                    "type": "function",
                    "function": {"name": self.one(("f", "", "a b")), "parameters": self.one(SCHEMAS)},
                }
                body |= {
                    "tools": [tool] * self.one((0, 1, 1024, 1025)),
                    "tool_choice": self.one(("auto", "required", "none")),
                }
            return path, {"model": MODEL, **body}
        if path == "/generate":
            fields["max_new_tokens"] = fields.pop("max_tokens")
            stream = fields.pop("stream", None)
            params = {name: value for name, value in fields.items() if name not in ("priority", "seed", *FLAGS[2:])}
            prompt = self.prompt()
            is_text = isinstance(prompt, str) or (isinstance(prompt, list) and str in map(type, prompt))
            kind = "text" if is_text else "input_ids"
            body = {kind: prompt, "sampling_params": params, "stream": stream, "logprob_start_len": number}
            return path, body | ({"return_logprob": True, "top_logprobs_num": self.one(INTEGERS)} if number % 2 else {})
        if path == "/v1/responses":
            names = ("temperature", "top_p", "stream")
            body = {name: fields[name] for name in names if name in fields}
            return path, {"model": MODEL, "input": self.one(TEXTS), "max_output_tokens": number, **body}
        if path == "/v1/embeddings":
            return path, {"model": MODEL, "input": self.prompt(), "dimensions": number}
        if path == "/tokenize":
            return path, {"model": MODEL, "prompt": self.one((*TEXTS, *OTHERS))}
        return path, {"model": MODEL, "tokens": self.ids()}  # /detokenize

    def offline(self) -> tuple[Any, dict[str, Any]]:
        """(prompt, fields of SamplingParams), of the types that Python has besides JSON's."""
        fields = self.sampling()
        for name in ("n", "priority", "stream", "return_token_ids"):
            fields.pop(name, None)
        if self.rng.random() < 0.3:
            fields[self.one(("logprobs", "prompt_logprobs", "pooling"))] = self.one((*INTEGERS, "last", "mean", True))
        if self.rng.random() < 0.2:
            kind = self.one(("regex", "json_schema", "choice", "ebnf", "json_object", "sql", 5))
            fields["grammar"] = self.one((Grammar(kind, self.one((*PATTERNS, 5, "\ud800"))), "x", {}))
        for name, value in fields.items():
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62:
                fields[name] = self.one((value, float(value), np.int64(value)))
            elif isinstance(value, list) and self.rng.random() < 0.3:
                fields[name] = self.one((tuple, iter, set if value and isinstance(value[0], int | str) else tuple))(
                    value
                )
            elif isinstance(value, float) and self.rng.random() < 0.3:
                fields[name] = self.one((np.float32 if abs(value) < 1e38 else float, np.float64, float))(value)
        prompt = self.prompt()
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) and max(map(abs, prompt)) < 1 << 62:
            prompt = self.one((prompt, np.array(prompt), [float(one) for one in prompt], tuple(prompt), [prompt]))
        return self.one(
            (prompt, np.array(["a", "b"]), "\ud800", b"bytes", 5)
        ) if self.rng.random() < 0.1 else prompt, fields


class Result(Counter[str]):
    """Statuses, as texts.  faults: what must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []


# ---- over HTTP ------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, result: Result, path: str, body: dict[str, Any]) -> None:
    """One request, read to its end."""
    started = time.monotonic()
    try:
        data = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with session.post(path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(120)) as response:
            answer = (await response.read()).decode()
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        result.faults.append(
            f"{path}: {type(error).__name__} {error} after {time.monotonic() - started:.1f} s: {data[:300]}"
        )
        return
    result[str(status)] += 1
    wrong = status >= 500 or (status >= 400 and "error" not in json.loads(answer))
    if wrong or any(f'"code":"{code}"' in answer for code in ("internal_error", "executors_lost", "nonfinite_logits")):
        result.faults.append(f"{path}: {status} {answer[:300]}: {data[:300]}")


async def healthy(session: aiohttp.ClientSession, result: Result, done: asyncio.Event) -> None:
    """Say the same again and again."""
    first = ""
    while not done.is_set():
        async with session.post("/v1/completions", json=HEALTHY) as response:
            answer = await response.json()
            if response.status == 429:
                await asyncio.sleep(0.01)
                continue
            text = answer["choices"][0]["text"] if response.status == 200 else str(answer)
        first = first or text
        result["healthy"] += 1
        if text != first:
            result.faults.append(f"the healthy stream said {text!r}, not {first!r}")
        await asyncio.sleep(0.01)


async def storm(url: str, result: Result, requests: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """All requests, some at a time, with a healthy stream beside them."""

    async def client() -> None:
        for path, body in requests:
            await ask(session, result, path, body)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        done = asyncio.Event()
        beside = asyncio.create_task(healthy(session, result, done))
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        done.set()
        await beside
        for _ in range(200):
            async with session.get("/stats", headers=as_operator()) as response:
                stats = await response.json()
            left = {name: stats["requests"][name] for name in ("open", "running", "waiting")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
        else:
            result.faults.append(f"requests are left: {left}")
        for kind in ("restarts", "tokenizer_restarts", "front_restarts"):
            if stats[kind]:
                result.faults.append(f"{kind}: {stats[kind]}")


def over_http(placement: str, num_requests: int, seed: int = 0) -> Result:
    """On `callboard serve`."""
    result, dice = Result(), Dice(seed)
    bar = tqdm(range(num_requests), desc=f"http, {placement}", unit="request", disable=None)
    with Server(*PLACEMENTS[placement], *SETTINGS) as server:
        asyncio.run(storm(server.url, result, (dice.http() for _ in bar)))
        if server.process.poll() is not None:
            result.faults.append(f"the server has ended with code {server.process.returncode}")
        result.faults += [line for line in server.logged().splitlines() if " ERROR " in line or "Traceback" in line]
    return result


# ---- from Python ----------------------------------------------------------------------------


def from_python(placement: str, num_requests: int, seed: int = 0) -> Result:
    """With ``LLM``.  Whatever is wrong is a RequestError."""
    result, dice, done = Result(), Dice(seed), threading.Event()
    tables: dict[str, dict[str, Any]] = {"model": {"max_model_len": MAX_LEN}, "kv": {"num_pages": 256}, "placement": {}}
    for setting in PLACEMENTS[placement]:
        key, _, value = setting.removeprefix("placement.").partition("=")
        if key != "ingress":  # requests enter in this process
            tables["placement"][key] = int(value) if value.isdigit() else value
    with LLM(str(ROOT / "examples" / "demo_model"), progress=False, config=tables) as llm:

        def beside() -> None:
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            first = ""
            while not done.is_set():
                text = "".join(delta.text for delta in llm.stream("def add(a, b):\n", params))
                first = first or text
                result["healthy"] += 1
                if text != first:
                    result.faults.append(f"the healthy stream said {text!r}, not {first!r}")

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            for _ in tqdm(range(num_requests), desc=f"python, {placement}", unit="request", disable=None):
                prompt, fields = dice.offline()
                said = f"{prompt!r:.200}, {fields!r:.300}"
                try:
                    llm.generate(prompt, SamplingParams(**fields))
                    result["taken"] += 1
                except RequestError as error:
                    result["refused"] += 1
                    if error.status >= 500:
                        result.faults.append(f"{error}: {said}")
                except Exception as error:
                    result.faults.append(f"{type(error).__name__}: {error}: {said}")
        finally:
            done.set()
            thread.join(far(120))
    return result


WAYS = {"http": over_http, "python": from_python}


def main() -> None:
    """Run it all, and say what has come of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="in all, over both ways in and all placements")
    parser.add_argument("--way", choices=WAYS, help="only this one")
    parser.add_argument("--placement", choices=PLACEMENTS, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs = [
        (way, placement)
        for way in ([options.way] if options.way else WAYS)
        for placement in ([options.placement] if options.placement else PLACEMENTS)
    ]
    num_faults = 0
    for number, (way, placement) in enumerate(runs):
        started = time.monotonic()
        result = WAYS[way](placement, -(-options.requests // len(runs)), options.seed + number)
        num_faults += len(result.faults)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(result.items()))
        print(
            f"{way}, {placement}: {counts}; {len(result.faults)} faults, {time.monotonic() - started:.0f} s", flush=True
        )
        for fault in result.faults[:20]:
            print(f"    {fault}", flush=True)
    sys.exit(bool(num_faults))


if __name__ == "__main__":
    main()
