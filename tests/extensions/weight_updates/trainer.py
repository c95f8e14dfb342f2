"""What a trainer asks of a live server."""

import json
from pathlib import Path
from typing import Any

from tests.server.http_client import ask
from tests.server.live_system import MODEL, LiveSystem

DEMO = Path(__file__).parents[3] / "examples" / "demo_model"
PROMPT = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def said(live: LiveSystem, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    reply = ask(live.port, method, path, body)
    return reply.status, json.loads(reply.body)


def choice(live: LiveSystem) -> dict[str, Any]:
    status, answer = said(live, "POST", "/v1/completions", PROMPT)
    assert status == 200
    return dict(answer["choices"][0])
