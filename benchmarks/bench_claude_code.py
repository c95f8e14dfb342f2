"""The share of Claude Code's prompts that the cache finds, with and without its first system block in them.

A session has 20 turns and 24 tools in the shape of Claude Code's requests, at their published length.  Each request is
read and rendered as ``/v1/messages`` does it, encoded by the demo model's tokenizer, and looked up in a tree of pages
with room for all.  The chat template writes the tools behind the system prompt, as those of Qwen and of Llama do.
Clients before 2.1.197 send a new hash (``cch=``) with each request; since then the block changes with each session.
Needs no GPU; ten seconds.

    python benchmarks/bench_claude_code.py
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from bench_radix import Stopwatch, new_tree, request
from rich.console import Console
from rich.table import Table

from engine.kv.pages import PageAllocator
from engine.text.chat import ChatTemplate
from engine.text.codec import TextCodec
from engine.types.prompt import ChatOptions
from server.extensions.anthropic.conversation import read_conversation, without_billing
from server.extensions.anthropic.requests import MessagesBody
from server.extensions.anthropic.tools import read_message_tools
from server.openai.conversation import HERMES

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
PAGE_SIZE, NUM_PAGES = 16, 200_000
NUM_TURNS, NUM_TOOLS, NUM_SESSIONS = 20, 24, 3
SYSTEM_WORDS, TOOL_WORDS, RESULT_WORDS = 2000, 250, 300
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- if loop.first and tools %}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
WORDS = (
    "read",
    "the",
    "file",
    "and",
    "each",
    "test",
    "that",
    "fails",
    "edit",
    "run",
    "check",
    "find",
    "write",
    "change",
)


def words(rng: random.Random, count: int) -> str:
    """Text of so many words."""
    return " ".join(rng.choices(WORDS, k=count))


def tools(rng: random.Random) -> list[dict[str, Any]]:
    """The tools, which are the same in all sessions."""
    fields = {name: {"type": "string", "description": words(rng, 8)} for name in ("path", "command", "pattern")}
    schema = {"type": "object", "properties": fields, "required": ["path"], "additionalProperties": False}
    return [
        {"name": f"Tool{number}", "description": words(rng, TOOL_WORDS), "input_schema": schema}
        for number in range(NUM_TOOLS)
    ]


def session(number: int, *, hashed: bool) -> Iterator[dict[str, Any]]:
    """The bodies of one session's requests.  hashed: whether the first block changes with each."""
    same, own = random.Random(0), random.Random(number + 1)
    said, functions = words(same, SYSTEM_WORDS), tools(same)
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": words(own, 60)}]}]
    for turn in range(NUM_TURNS):
        varied = f" cch={own.getrandbits(20):05x};" if hashed else ""
        billing = f"x-anthropic-billing-header: cc_version=2.1.197.{number:03x}; cc_entrypoint=cli;{varied}"
        yield {
            "model": "m",
            "max_tokens": 32_000,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": said}],
            "tools": functions,
            "messages": [*messages],
        }
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Tool1", "input": {"path": words(own, 2)}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": words(own, RESULT_WORDS)}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": words(own, 12)}, call]},
            {"role": "user", "content": [result]},
        ]


def shares(codec: TextCodec, template: ChatTemplate, *, hashed: bool, left_out: bool) -> tuple[float, float, int]:
    """Return the shares of prompt tokens found after a session's first turn and at first turns, and all tokens."""
    tree, allocator, watch = new_tree(PAGE_SIZE), PageAllocator(NUM_PAGES), Stopwatch()
    later, first, num_tokens = [0, 0], [0, 0], 0
    for number in range(NUM_SESSIONS):
        for turn, raw in enumerate(session(number, hashed=hashed)):
            body = msgspec.convert(raw, MessagesBody)
            body = without_billing(body) if left_out else body
            described = read_message_tools(body.tools, None, HERMES).described
            prompt = codec.encode(template.render(read_conversation(body), ChatOptions(tools=described)))
            tree.now += 1
            found, _ = request(tree, allocator, prompt, watch)
            num_tokens += len(prompt)
            if turn or number:
                counts = later if turn else first
                counts[0] += found * PAGE_SIZE
                counts[1] += len(prompt)
    return later[0] / later[1], first[0] / first[1], num_tokens


def main() -> None:
    codec, template = TextCodec.load(DEMO), ChatTemplate(TEMPLATE, origin="template", variables={})
    table = Table("first block", "in the prompt", "found in later turns", "found by a new session", "prompt tokens")
    for hashed in (True, False):
        for left_out in (False, True):
            later, first, num_tokens = shares(codec, template, hashed=hashed, left_out=left_out)
            changes = "changes with each request" if hashed else "changes with each session"
            table.add_row(changes, "no" if left_out else "yes", f"{later:.1%}", f"{first:.1%}", f"{num_tokens:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
