"""Transcripts of agents: their requests over 20 turns with tools are answered, and what is repeated is found.

Each client is a generator of (path, body, headers) in its published shape, shortened to the context of the demo model.
A watcher of the planner sees the tokens of every prompt, so the repeated prefix is counted in tokens: it is the longest
beginning that a prompt shares with an earlier one of its conversation.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.messages import Admit
from engine.scheduling.events import PlannerWatcher
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import Sequence
from tests.server.engine_server import EngineServer
from tests.server.http_client import Reply, ask

NUM_TURNS = 20
Asked = tuple[str, dict[str, Any], dict[str, str]]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
OK = {"role": "assistant", "content": "Ok."}
FUNCTION = {"name": "bash", "description": "Run.", "parameters": SCHEMA}


class Prompts(PlannerWatcher):
    """The prompts that have arrived, in order, and how many tokens of each were found in the cache."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.cached: list[int] = []

    def arrived(self, sequence: Sequence, message: Admit) -> None:
        self.tokens.append(sequence.tokens.copy())

    def finished(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        self.cached.append(metrics.cached_tokens)


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    kv, device = {"num_pages": 1024, "page_size": 8}, {"kind": "cpu", "threads": 1}
    server = EngineServer(model={"name": "demo"}, kv=kv, device=device, plugins={"eviction": "lease"})
    server.system.watchers["prompts"] = Prompts()
    with server:
        yield server


def command(turn: int) -> str:
    return json.dumps({"cmd": f"ls {turn}"})


def claude_code() -> Iterator[Asked]:
    """Claude Code: a line for billing that changes, blocks of system text, a moving cache_control, counted before."""
    kept = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "fix it", **kept}]}]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}
    tool = {"name": "Bash", "description": "Run.", "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#",
            **SCHEMA, "additionalProperties": False}}  # fmt: skip
    for turn in range(NUM_TURNS):
        billing = f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={turn:05x};"
        body = {
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": "You are Claude Code.", **kept}],
            "tools": [tool],
            "messages": [*messages],
        }
        yield f"{MESSAGES}/count_tokens?beta=true", body, headers
        more = {"max_tokens": 32000, "temperature": 0, "stream": True, "metadata": {"user_id": "user_a_session_b"}}
        yield f"{MESSAGES}?beta=true", {**body, **more}, headers
        (last,) = messages[-1]["content"]
        messages[-1] = {"role": "user", "content": [{key: last[key] for key in last if key != "cache_control"}]}
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"cmd": f"ls {turn}"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": "ok", "is_error": False, **kept}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def codex() -> Iterator[Asked]:
    """Codex CLI: items, tools that cannot be run here beside functions and custom ones, thoughts that are encrypted."""
    text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]}
    items: list[dict[str, Any]] = [text]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [
        {"type": "function", **FUNCTION, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "description": "More.", "tools": [
            {"type": "function", "name": "see", "parameters": SCHEMA, "strict": False},
        ]},
    ]  # fmt: skip
    for turn in range(NUM_TURNS):
        yield (
            RESPONSES,
            {
                "instructions": "You are Codex.",
                "input": [*items],
                "tools": tools,
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "reasoning": {"effort": "medium", "summary": "auto"},
                "store": False,
                "stream": True,
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "codex-session",
                "temperature": 0,
            },
            {"session_id": "codex-session", "originator": "codex_cli_rs"},
        )
        call = {"name": "bash", "arguments": command(turn), "call_id": f"c{turn}"}
        thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}
        output = {"type": "function_call_output", "call_id": f"c{turn}", "output": "ok"}
        items += [thought, {"type": "function_call", **call}, output]


def chat(system: str, content: Any, **more: Any) -> Iterator[Asked]:
    """A client of chat completions with tools.  content: of the assistant beside its calls."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": "fix it"}]
    for turn in range(NUM_TURNS):
        tools = [{"type": "function", "function": FUNCTION}]
        body = {"messages": [*messages], "tools": tools, "stream": True, "stream_options": {"include_usage": True}}
        yield CHAT, {**body, "temperature": 0, **more}, {}
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": command(turn)}}
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "ok"},
        ]


def opencode() -> Iterator[Asked]:
    """The client opencode, by the AI SDK."""
    yield from chat("You are opencode.", "", tool_choice="auto", max_tokens=32000)


def continued() -> Iterator[Asked]:
    """Continue in agent mode: an assistant that only calls has a space as its content."""
    yield from chat("You are in agent mode.", " ", parallel_tool_calls=False, max_tokens=1000)


def aider() -> Iterator[Asked]:
    """The client aider: no tools, an answer is text; files and a reminder stand behind what was said before."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "Act as an expert developer. Edit in blocks."}]
    said += [
        {"role": "user", "content": "Here is a map of the repository: a.py"},
        OK,
    ]
    for turn in range(NUM_TURNS):
        files = [
            {"role": "user", "content": "a.py: def f(): ..."},
            OK,
        ]
        now = {"role": "user", "content": f"add test {turn}"}
        reminder = {"role": "system", "content": "Edit in blocks."}
        yield CHAT, {"messages": [*said, *files, now, reminder], "stream": True, "temperature": 0}, {}
        said += [now, {"role": "assistant", "content": f"a.py: def test_{turn}(): ..."}]


def open_webui() -> Iterator[Asked]:
    """Open WebUI: a conversation, and short tasks of its own about it between the turns."""
    messages: list[dict[str, Any]] = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"question {turn}"})
        yield CHAT, {"messages": [*messages], "stream": True, "temperature": 0}, {}
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        if not turn % 5:
            task = {"role": "user", "content": f"### Task: a title of 3 words.\n{messages[-1]['content']}"}
            yield CHAT, {"messages": [task], "stream": False, "max_completion_tokens": 5}, {}


def whole(reply: Reply, path: str) -> str:
    """The text of a stream's answer.  It must have the end that clients wait for."""
    text = reply.body.decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path.startswith(MESSAGES):
        assert events[-1]["type"] == "message_stop"
        return "".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta")
    if path.startswith(RESPONSES):
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert text.endswith("data: [DONE]\n\n")
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])


def num_shared(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@pytest.mark.parametrize(
    "client, least_found",
    [(claude_code, 0.9), (codex, 0.9), (opencode, 0.9), (continued, 0.9), (aider, 0.7), (open_webui, 0.7)],
)
def test_what_agents_repeat_is_found(client: Any, least_found: float, served: EngineServer) -> None:
    seen = served.system.watchers["prompts"]
    assert isinstance(seen, Prompts)
    begin, counted = len(seen.tokens), []
    for path, body, headers in client():
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        if "count_tokens" not in path and "max_completion_tokens" not in body:
            body |= {limit: 3}
        reply = ask(served.port, "POST", path, {"model": "demo", **body}, headers)
        assert reply.status == 200, reply.body
        if "count_tokens" in path:
            counted.append(reply.json["input_tokens"])
        elif body.get("stream"):
            answer, last = whole(reply, path), (path, {"model": "demo", **body}, headers)
    prompts, cached = seen.tokens[begin:], seen.cached[begin:]
    shared = [max((num_shared(one, earlier) for earlier in prompts[:at]), default=0) for at, one in enumerate(prompts)]
    assert len(prompts) == len(cached) >= NUM_TURNS
    assert sum(cached) > 0.95 * sum(shared)
    assert sum(cached) > least_found * sum(map(len, prompts))
    assert counted in ([], list(map(len, prompts)))
    path, body, headers = last  # its prompt computed again, without the cache, has the same answer
    assert whole(ask(served.port, "POST", path, {**body, "cache_salt": client.__name__}, headers), path) == answer
    assert seen.cached[-1] == 0
