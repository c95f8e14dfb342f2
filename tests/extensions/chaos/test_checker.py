"""The checker refuses logs of runs that broke a promise, and knows nothing of the code that it judges."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import server.extensions.chaos.checker as checker_module
from server.extensions.chaos.checker import ReferenceModel, check
from server.extensions.chaos.sim.oracle import ADAPTERS, VOCAB, as_prompt, continuation

PROMPT = [5, 9, 200]
RIGHT = continuation(as_prompt(PROMPT), 4)


def log(*events: dict[str, Any]) -> list[str]:
    head = {"event": "run", "vocab": VOCAB, "longest": 64, "special": []}
    asked = {
        "event": "asked", "request": 1, "prompt": PROMPT, "most": 4, "least": 4, "stop_ids": [], "stops": [],
        "include_stop": False, "ignore_eos": True, "adapter": 0,
    }  # fmt: skip
    return [json.dumps({"t": 0.0, **one}) for one in (head, asked, *events)]


def tokens(some: list[int]) -> dict[str, Any]:
    return {"event": "tokens", "request": 1, "tokens": some}


def end(why: str = "length") -> dict[str, Any]:
    return {"event": "end", "request": 1, "why": why}


OVER = {"event": "over"}
WHOLE = {"event": "pages", "counts": [3, 1, 0, 0], "total": 4}


def test_it_imports_nothing_of_callboard() -> None:
    tree = ast.parse(Path(checker_module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "sys", "collections.abc", "typing"}


@pytest.mark.parametrize("adapter", range(len(ADAPTERS)))
def test_its_model_is_the_devices(adapter: int) -> None:
    model = ReferenceModel(PROMPT, VOCAB, adapter).tokens()
    assert [next(model) for _ in range(50)] == continuation(as_prompt(PROMPT), 50, ADAPTERS[adapter])


def test_a_run_that_kept_its_promises_passes() -> None:
    why, checker = check(log(tokens(RIGHT[:2]), WHOLE, tokens(RIGHT[2:]), end(), OVER))
    assert why == ""
    assert (checker.num_asked, checker.num_ended, checker.num_tokens, checker.num_pages_counted) == (1, 1, 4, 1)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((tokens(RIGHT), end(), end(), OVER), "ends twice"),
        ((tokens(RIGHT), OVER), "have no end"),
        ((tokens(RIGHT), end()), "did not come to rest"),
        ((tokens(RIGHT), end(), tokens(RIGHT[:1]), OVER), "goes on after its end"),
        ((tokens([*RIGHT[:3], RIGHT[3] ^ 1]), end(), OVER), "the model has"),
        ((tokens(RIGHT[:3]), end(), OVER), "3 of 4 tokens"),
        ((tokens(RIGHT[:3]), end("executors_lost"), OVER), "no fault of the run explains it"),
        ((tokens(RIGHT), end(), {**WHOLE, "counts": [3, 0, 0, 0]}, OVER), "the pool has 4"),
        ((tokens(RIGHT), end(), {**WHOLE, "counts": [2, 1, 1, 0]}, OVER), "at rest, pages"),
    ],
)
def test_a_broken_promise_is_named(events: tuple[dict[str, Any], ...], why: str) -> None:
    assert why in check(log(*events))[0]


def test_a_fault_explains_an_early_end() -> None:
    lost = {"event": "fault", "kind": "Lose"}
    assert check(log(lost, tokens(RIGHT[:3]), end("executors_lost"), OVER))[0] == ""
