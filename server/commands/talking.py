"""``callboard generate`` and ``callboard chat``: the model in this process, at a terminal.

Owns: what a person at the terminal sees, and how answers are sampled there.  Does not know: how the engine writes them.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from engine.config import Config
from engine.llm import LLM
from engine.types.errors import RequestError
from engine.types.params import SamplingParams

GENERATING: dict[str, float] = {"temperature": 0.7}
# Without them the answers of small models wander off; a checkpoint that recommends any parameter knows better.
CHATTING: dict[str, float] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}


def generate(parsed: argparse.Namespace, config: Config) -> None:
    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    with LLM(config=config, progress=False) as llm:
        for number, delta in enumerate(llm.stream(prompt, _sampling_params(parsed, GENERATING))):
            print(delta.text if number else prompt + delta.text, end="", flush=True)
        print()


def chat(parsed: argparse.Namespace, config: Config) -> None:
    console = Console(highlight=False)
    opening = [{"role": "system", "content": parsed.system}] if parsed.system else []
    turns = list(opening)
    with LLM(config=config, progress=False) as llm:
        recommended = llm.sampling_defaults
        params = _sampling_params(parsed, GENERATING | recommended if recommended else CHATTING)
        sampled = f"temperature {params.temperature:g}, top_p {params.top_p:g}, min_p {params.min_p:g}"
        console.print(f"[dim]{sampled} (--temperature, --top-p, --min-p)[/dim]")
        console.print("[dim]/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer[/dim]")
        while True:
            try:
                text = console.input("[bold]you>[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if text == "/quit":
                return
            if text == "/reset":
                turns = list(opening)
                console.print("[dim]the conversation is empty again[/dim]")
            elif text.startswith("/"):
                console.print("[dim]known commands: /reset, /quit[/dim]")
            elif text:
                turns.append({"role": "user", "content": text})
                answer = _answer(llm, turns, params)
                if answer is None:
                    turns.pop()
                else:
                    turns.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, turns: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Stream one answer to the terminal; None if it was refused."""
    pieces: list[str] = []
    try:
        for delta in llm.stream(turns, params):
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"refused: {error}")
        return None
    print()
    return "".join(pieces)


def _sampling_params(parsed: argparse.Namespace, defaults: Mapping[str, float]) -> SamplingParams:
    given = {name: value for name in CHATTING if (value := getattr(parsed, name)) is not None}
    known: dict[str, Any] = {**defaults, **given}
    return SamplingParams(max_tokens=parsed.max_tokens, seed=parsed.seed, **known)
