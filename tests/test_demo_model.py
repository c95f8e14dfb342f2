"""The demo model: what it is taught is true of this tree, what examines it is never taught, and it answers."""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callboard import LLM, SamplingParams
from engine.config import Config, build_config, load_config
from engine.control.system import System
from engine.settings.sections import ServerSection
from engine.text.chat import ChatTemplate
from server.cli import _parser
from server.model_card import ModelCard
from server.run.greeting import greet

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=80)


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts that train it stand beside each other, as they run."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(FOLDER)):
            del sys.modules[name]


def test_facts_name_settings_commands_files_and_routes_that_exist() -> None:
    from forms import read_facts

    said = "\n".join(text for fact in read_facts() for text in (fact.say, fact.why, fact.how))
    sections = msgspec.to_builtins(Config())
    named = re.findall(r"\b(?<!/)(model|device|kv|scheduler|placement|graphs|plugins|server|limits)\.([a-z]\w+)", said)
    assert len(named) > 40
    assert [f"{table}.{key}" for table, key in named if key not in sections[table] and key != "gguf"] == []
    (commands,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    called = set(
        re.findall(r"\bcallboard (serve|generate|chat|config|plugins|models|tune|verify|doctor|[a-z]+ --)", said)
    )
    assert called >= {"serve", "generate", "chat", "config", "plugins", "models", "tune", "verify", "doctor"}
    assert {name.split()[0] for name in called} <= set(commands.choices)
    files = re.findall(r"\b(?:docs|deploy|examples|engine|benchmarks)/[\w/.-]*\w", said)
    assert [file for file in files if not (ROOT / file).exists()] == []
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("api.md", "operations.md"))
    assert [route for route in re.findall(r"\b(?:GET|POST) (/\w[\w/]*)", said) if route not in pages] == []


def test_what_examines_is_never_taught() -> None:
    from exam import examination
    from forms import read_facts
    from talks import Talks

    facts = read_facts()
    asked = {form for fact in facts for form in fact.asked}
    held_out = {form for fact in facts for form in fact.held_out}
    assert not asked & held_out
    assert 0.08 < len(held_out) / len(asked | held_out) < 0.16
    probes = examination(Talks(facts, random.Random(1)))
    own = {probe.turns[0][1].lower().rstrip("?") for probe in probes if probe.kind == "own words"}
    assert len(own) > 80
    assert not own & (asked | held_out)


def test_conversations_are_taught_as_the_chat_template_renders_them() -> None:
    from forms import read_facts
    from lessons import encode
    from talks import Talks
    from tokenizers import Tokenizer

    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(), origin="demo", variables={})
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    talks = Talks(read_facts(), random.Random(3))
    for turns in (talks.next() for _ in range(200)):
        rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        lesson = encode(tokenizer, turns)
        assert lesson.ids == tokenizer.encode(rendered).ids
        taught = tokenizer.decode([i for i, mine in zip(lesson.ids, lesson.taught, strict=True) if mine], False)
        assert taught == "".join(f"{content}<|im_end|>" for role, content in turns if role == "assistant")
        messages = [msgspec.convert({"role": role, "content": content}, Any) for role, content in turns]
        assert template._template.render(messages=messages) == rendered


def test_tools_are_offered_and_called_as_it_is_taught() -> None:
    import tools

    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(), origin="demo", variables={})._template
    functions = [
        {"name": "calc", "description": "Calculates", "parameters": {"properties": {"expr": {}, "digits": {}}}},
        {"name": "now"},
    ]
    call = {"type": "function", "function": {"name": "calc", "arguments": {"expr": "3 + 4"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    calculator = tools.Tool("calc", "Calculates", ("expr", "digits"))
    turns = [
        ("system", tools.system([calculator, tools.Tool("now", "", ())], "Be polite.")),
        ("user", "What is 3 + 4?"),
        ("assistant", tools.call(calculator, {"expr": "3 + 4"})),
        ("tool", "7"),
    ]
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    given = [{"type": "function", "function": function} for function in functions]
    template.environment.filters["tojson"] = json.dumps
    assert template.render(messages=messages, tools=given, add_generation_prompt=True) == (
        f"{rendered}<|im_start|>assistant\n"
    )
    assert template.render(messages=messages[1:2], tools=functions).startswith("<|im_start|>system\nTools:\ncalc(")


def test_it_answers_in_its_own_words_remembers_what_was_said_and_calls_tools() -> None:
    from exam import examination
    from forms import read_facts
    from talks import UNKNOWN, Talks

    talks = Talks(read_facts(), random.Random(1))
    chosen = random.Random(4).sample(examination(talks), 60)
    conversations = [[{"role": role, "content": text} for role, text in probe.turns] for probe in chosen]
    (page,) = (fact for fact in talks.facts if fact.say.startswith("A page is"))
    followed = [("user", "What is a page?"), ("assistant", page.say), ("user", "and why?")]
    conversations.append([{"role": role, "content": text} for role, text in followed])
    conversations.append([{"role": "user", "content": "Who wrote Hamlet?"}])
    with LLM(str(FOLDER), progress=False) as llm:
        answers = [answer.text for answer in llm.chat(conversations, GREEDY)]
    assert answers[-2:] == [page.why, UNKNOWN]
    assert sum(answer == probe.answer for answer, probe in zip(answers, chosen, strict=False)) >= 48


def test_python_is_learnt_from_what_is_written_and_from_what_the_teacher_expects() -> None:
    import torch
    from network import TINY, build_model
    from teach import TEACHER_SHARE, code_loss

    model, teacher = build_model(TINY, 0).eval(), build_model(TINY, 1).eval()
    tokens = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    surprise = -model(input_ids=inputs).logits.log_softmax(-1)
    written = surprise.gather(-1, targets[..., None]).mean()
    expected = (teacher(input_ids=inputs).logits.softmax(-1) * surprise).sum(-1).mean()
    loss = code_loss(model, teacher, inputs, targets)
    torch.testing.assert_close(loss, (1 - TEACHER_SHARE) * written + TEACHER_SHARE * expected)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("path", ["demo", str(FOLDER)])
def test_it_has_one_name_and_is_called_a_toy(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    system = System(build_config(Config(), {"model": {"path": path}}))
    assert system.model_name == ("callboard-demo" if path == "demo" else "demo_model")
    assert load_config(ROOT / "examples" / "demo.toml").model.name == "callboard-demo"
    greet(system, "http://127.0.0.1:8000", needs_key=False, took_s=1.0)
    said = capsys.readouterr().out
    assert (
        f"{system.model_name}, a toy of 3.4 million parameters, is ready after 1.0 s at http://127.0.0.1:8000" in said
    )
    assert "What is a page?" in said  # which it was taught
    assert ModelCard.of(system, ServerSection()).about == "a toy of 3.4 million parameters"
    system.follow(replace(system.engine, num_parameters=600_000_000))
    greet(system, "http://127.0.0.1:8000", needs_key=False, took_s=1.0)
    said = capsys.readouterr().out
    assert "toy" not in said
    assert "What is the capital of France?" in said
