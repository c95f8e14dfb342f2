"""Budgets of thoughts: a demo model that has tokens around its thoughts, and never closes them by itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.extensions.thinking_budget.extension import find_marks
from tests.server.engine_server import EngineServer
from tests.server.http_client import Reply, ask

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
MARKS = ("<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model whose two last tokens are the marks."""
    folder = tmp_path_factory.mktemp("checkpoint") / "thinker"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "data", "__pycache__"))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    by_id = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    for mark, number in zip(MARKS, sorted(by_id)[-2:], strict=True):
        del tokenizer["model"]["vocab"][by_id[number]]
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) != by_id[number]]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": mark, **flags})
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[EngineServer]:
    model, plugins = {"path": str(checkpoint), "name": "demo"}, {"logits_processors": ["thinking_budget"]}
    with EngineServer(model=model, plugins=plugins) as server:
        yield server


def chat(served: EngineServer, **fields: Any) -> Reply:
    messages = [{"role": "user", "content": "What is it?"}]
    given = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    return ask(served.port, "POST", "/v1/chat/completions", {**given, **fields})


def thoughts(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    tokens: int = reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens"])
def test_thoughts_end_after_the_budget_and_an_answer_follows(served: EngineServer, name: str) -> None:
    free = chat(served)
    assert thoughts(free) == 40, "the model does not close them by itself"
    for budget in (0, 5, 17):
        reply = chat(served, **{name: budget})
        assert thoughts(reply) == budget + 1, "with the token that closes them"
        message = reply.json["choices"][0]["message"]
        assert message["content"]
        assert free.json["choices"][0]["message"]["reasoning_content"].startswith(message.get("reasoning_content", ""))
    assert thoughts(chat(served, **{name: 100})) == 40


def test_a_prompt_that_closes_thoughts_leaves_no_budget_to_spend(served: EngineServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain, limited = chat(served, **off), chat(served, **off, thinking_token_budget=3)
    assert plain.json["choices"][0]["message"]["content"] == limited.json["choices"][0]["message"]["content"]


def test_a_form_of_the_answer_holds_behind_the_thoughts(served: EngineServer) -> None:
    reply = chat(served, thinking_token_budget=4, guided_regex="[0-9]{3}", ignore_eos=False)
    assert thoughts(reply) == 5
    assert reply.json["choices"][0]["message"]["content"].isdecimal()


def test_requests_of_one_step_have_budgets_of_their_own(served: EngineServer) -> None:
    bodies = [chat(served, n=3, thinking_token_budget=budget, seed=budget, temperature=1.0) for budget in (2, 9)]
    for body, budget in zip(bodies, (2, 9), strict=True):
        assert thoughts(body) <= 3 * (budget + 1)


def test_an_effort_is_a_budget_where_the_template_does_not_read_it(
    served: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert thoughts(chat(served, reasoning_effort="none")) == 1, "the token that closes them"
    assert thoughts(chat(served, reasoning_effort="none", max_thinking_tokens=5)) == 6, "a budget goes before"
    assert thoughts(chat(served, reasoning_effort="unheard")) == thoughts(chat(served, reasoning_effort="low")) == 40
    body = {"model": "demo", "input": "What is it?", "max_output_tokens": 40, "temperature": 0, "ignore_eos": True}
    reply = ask(served.port, "POST", "/v1/responses", {**body, "reasoning": {"effort": "none"}})
    assert reply.json["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    monkeypatch.setattr(type(served.system.codec), "template_source", TEMPLATE + "{{ reasoning_effort }}")
    marks = find_marks(served.system.codec)
    assert marks is not None
    assert marks.reads_effort


def test_anthropics_budget_is_followed(served: EngineServer) -> None:
    body = {
        "model": "demo",
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is it?"}],
        "thinking": {"type": "enabled", "budget_tokens": 6},
        "temperature": 0,
    }
    reply = ask(served.port, "POST", "/v1/messages", body)
    assert [block["type"] for block in reply.json["content"]] == ["thinking", "text"]
    counted = ask(served.port, "POST", "/tokenize", {"prompt": reply.json["content"][0]["thinking"]}).json["count"]
    assert counted <= 6


def test_a_budget_that_nothing_can_keep_is_refused(served: EngineServer, checkpoint: Path) -> None:
    assert chat(served, thinking_token_budget=-1).error["param"] == "thinking_token_budget"
    no_thoughts = {"model": {"name": "demo"}, "plugins": {"logits_processors": ["thinking_budget"]}}
    for sections in (no_thoughts, {"model": {"path": str(checkpoint), "name": "demo"}}):
        with EngineServer(**sections) as other:
            reply = chat(other, thinking_token_budget=3)
            assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
            assert "plugins.logits_processors" in reply.error["message"]
            thinking = {"type": "enabled", "budget_tokens": 1024}
            message = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            assert ask(other.port, "POST", "/v1/messages", {**message, "thinking": thinking}).status == 200


def test_a_token_that_the_model_does_not_have_is_refused(served: EngineServer) -> None:
    table = {"tokens": 0, "opens": 1, "closes": 2_000_000_000}
    reply = chat(served, logits_processors={"thinking_budget": table})
    assert (reply.status, reply.error["param"]) == (400, "logits_processors")
    assert "$.closes" in reply.error["message"]
    assert thoughts(chat(served)) == 40
