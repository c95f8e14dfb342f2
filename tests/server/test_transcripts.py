"""Transcripts of agents: their requests over 20 turns with tools are answered, and what is repeated is found.

Each client is a generator of (path, body, headers) in the shape that its package sends (Open WebUI's is read from its
source), shortened to the context of the demo model.
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
    """Claude Code 2.1.197: a billing line, a system message behind the first, a cache_control that moves, a picture."""
    kept = {"cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "fix it", **kept}]},
        {"role": "system", "content": "Agents: claude, Explore."},
    ]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}
    headers["X-Claude-Code-Session-Id"] = "b"
    tool = {"name": "Bash", "description": "Run.", "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema",
            **SCHEMA, "additionalProperties": False}}  # fmt: skip
    for turn in range(NUM_TURNS):
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli; cch={turn:05x};"
        texts = ("You are a Claude agent.", "Help with software.")
        body = {
            "system": [{"type": "text", "text": billing}, *({"type": "text", "text": one, **kept} for one in texts)],
            "tools": [tool],
            "messages": [*messages],
        }
        yield f"{MESSAGES}/count_tokens?beta=true", body, headers
        more = {"max_tokens": 32000, "temperature": 0, "stream": True, "thinking": {"type": "adaptive"}}
        more |= {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
        more |= {"output_config": {"effort": "high"}, "metadata": {"user_id": '{"device_id":"a","session_id":"b"}'}}
        yield f"{MESSAGES}?beta=true", {**body, **more}, headers
        for message in messages:  # the mark goes to the last message
            if isinstance(message["content"], list):
                message["content"] = [
                    {key: one[key] for key in one if key != "cache_control"} for one in message["content"]
                ]
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"cmd": f"ls {turn}"}}
        found: Any = (
            "ok"
            if turn
            else [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}]
        )
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": found, "is_error": False, **kept}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
            {"role": "user", "content": [result]},
        ]


def codex() -> Iterator[Asked]:
    """Codex CLI 0.171: two developer messages, tools that cannot be run here, a namespace, what view_image returns."""
    said = (("developer", "You are Codex."), ("developer", "Be careful."), ("user", "cwd: /"), ("user", "fix it"))
    items: list[dict[str, Any]] = [
        {"type": "message", "id": f"msg_{at}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for at, (role, text) in enumerate(said)
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [
        {"type": "function", **FUNCTION, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
        {"type": "namespace", "name": "multi_agent_v1", "description": "More.", "tools": [
            {"type": "function", "name": "wait", "parameters": SCHEMA, "strict": False},
        ]},
        {"type": "web_search", "external_web_access": False},
    ]  # fmt: skip
    for turn in range(NUM_TURNS):
        yield (
            RESPONSES,
            {
                "input": [*items],
                "tools": tools,
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "reasoning": {"summary": "auto"},
                "store": False,
                "stream": True,
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "codex-session",
                "client_metadata": {"session_id": "codex-session"},
                "temperature": 0,
            },
            {"session-id": "codex-session", "thread-id": "codex-session", "originator": "codex_exec"},
        )
        text = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
        message = {"type": "message", "status": "completed", "id": f"m{turn}", "role": "assistant", "content": [text]}
        call = {
            "type": "function_call",
            "status": "completed",
            "id": f"fc_{turn}",
            "name": "bash",
            "call_id": f"c{turn}",
        }
        found = "ok" if turn else [{"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "high"}]
        output = {"type": "function_call_output", "id": f"fco_{turn}", "call_id": f"c{turn}", "output": found}
        items += [message, {**call, "arguments": command(turn)}, output]


def chat(system: str, **more: Any) -> Iterator[Asked]:
    """A client of chat completions with tools."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": "fix it"}]
    for turn in range(NUM_TURNS):
        tools = [{"type": "function", "function": FUNCTION}]
        body = {"messages": [*messages], "tools": tools, "stream": True, "stream_options": {"include_usage": True}}
        yield CHAT, {**body, "temperature": 0, **more}, {"x-session-id": system}
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": command(turn)}}
        messages += [
            {"role": "assistant", "content": "Let me see.\n", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "ok"},
        ]


def opencode() -> Iterator[Asked]:
    """The client opencode 1.18, by the AI SDK: a title first, for which two messages of the user are in a row."""
    asked = [
        {"role": "user", "content": "Generate a title for this conversation:\n"},
        {"role": "user", "content": "fix it"},
    ]
    title = {"messages": [{"role": "system", "content": "You are a title generator."}, *asked], "stream": True}
    yield CHAT, {**title, "temperature": 0}, {}
    yield from chat("You are opencode.", tool_choice="auto", max_tokens=32000)


def continued() -> Iterator[Asked]:
    """The CLI of Continue 1.5."""
    yield from chat("You are an agent in the Continue CLI.")


def aider() -> Iterator[Asked]:
    """The client aider 0.86: no tools; the files stand behind what was said before, a reminder in the last message."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "Act as an expert developer. Edit in blocks."}]
    said += [{"role": "user", "content": "Be casual."}, {"role": "assistant", "content": "I will: 1. Switch."}]
    said += [{"role": "user", "content": "I switched to a new code base."}, OK]
    for turn in range(NUM_TURNS):
        files = [
            {"role": "user", "content": "I have added these files: a.py def f(): ..."},
            {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        ]
        now = {"role": "user", "content": f"add test {turn}\n\nEdit in blocks."}
        yield CHAT, {"messages": [*said, *files, now], "stream": True, "temperature": 0}, {}
        said += [
            {"role": "user", "content": f"add test {turn}  \n"},
            {"role": "assistant", "content": f"test_{turn}(): ..."},
        ]


def open_webui() -> Iterator[Asked]:
    """Open WebUI 0.12: a conversation, and short tasks of its own about it between the turns."""
    messages: list[dict[str, Any]] = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"question {turn}"})
        more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        yield CHAT, {"messages": [*messages], **more}, {}
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        if not turn % 5:
            task = {"role": "user", "content": f"### Task: a title of 3 words.\n{messages[-1]['content']}"}
            yield CHAT, {"messages": [task], "stream": False, "max_tokens": 1000}, {}


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
    [(claude_code, 0.9), (codex, 0.9), (opencode, 0.85), (continued, 0.9), (aider, 0.6), (open_webui, 0.7)],
)
def test_what_agents_repeat_is_found(client: Any, least_found: float, served: EngineServer) -> None:
    seen = served.system.watchers["prompts"]
    assert isinstance(seen, Prompts)
    begin, counted = len(seen.tokens), []
    for path, body, headers in client():
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        if "count_tokens" not in path:
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
