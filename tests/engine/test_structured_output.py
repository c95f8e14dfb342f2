"""Grammars through the whole engine: overlap, company, retraction and stops change nothing of what they promise."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from callboard import LLM, SamplingParams
from engine.types.errors import RequestError
from engine.types.params import Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
REGEX = Grammar("regex", r"[a-d]{4,12}=[0-9]{1,3}(\.[0-9]{2})?")
PROMPTS = [f"person_{index} = " for index in range(12)]


def params(grammar: Grammar | None, seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, seed=seed, **{"temperature": 1.0, "max_tokens": 200, **more})


def mixed() -> list[SamplingParams]:
    """Rows with a schema, with an expression, and with neither, greedy and not."""
    kinds = [SCHEMA, REGEX, None]
    return [params(kinds[n % 3], n, temperature=float(n % 2), max_tokens=200 if n % 3 < 2 else 30) for n in range(12)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False) as llm:
        yield llm


def check(prompt_params: SamplingParams, text: str, reason: str) -> None:
    grammar = prompt_params.grammar
    if grammar is None or reason == "length":
        return
    assert reason == "stop"
    if grammar is REGEX:
        assert re.fullmatch(REGEX.source, text)
        return
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= set("abc")


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """Every request by itself."""
    return [llm.generate([prompt], one)[0].text for prompt, one in zip(PROMPTS, mixed(), strict=True)]


def test_outputs_follow_their_grammars(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, mixed())
    for one, output in zip(mixed(), outputs, strict=True):
        check(one, output.text, output.finish_reason)
    assert sum(output.finish_reason == "stop" for output in outputs) >= 6


@pytest.mark.parametrize(
    "sections",
    [{"scheduler": {"overlap_depth": 1}}, {"scheduler": {"max_running": 3, "max_step_tokens": 16, "prefill_chunk": 4}}],
    ids=["no overlap", "small steps"],
)
def test_nothing_about_the_batch_changes_an_output(alone: list[str], sections: dict[str, Any]) -> None:
    with LLM(progress=False, config=sections) as llm:
        assert [output.text for output in llm.generate(PROMPTS, mixed())] == alone


def test_an_output_that_is_retracted_goes_on_where_it_stood(alone: list[str]) -> None:
    for _ in range(20):  # who is let in depends on who arrives when, and an engine soon knows how long outputs are
        with LLM(progress=False, config={"kv": {"num_pages": 15}}) as llm:  # far fewer than twelve rows want
            planner = llm._system.scheduler._planned
            llm.generate(["x"] * 40, SamplingParams(max_tokens=2))  # outputs look short, so many are let in
            assert [output.text for output in llm.generate(PROMPTS, mixed())] == alone
        if planner.meter.num_retractions:
            break
    assert planner.meter.num_retractions


def test_a_stop_string_and_a_token_limit_still_end_an_output(llm: LLM) -> None:
    (stopped,) = llm.generate([PROMPTS[0]], params(SCHEMA, 1, stop=('"age"',)))
    assert stopped.stop_reason == '"age"'
    (cut,) = llm.generate([PROMPTS[0]], params(SCHEMA, 1, max_tokens=4))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 4)


def test_min_tokens_cannot_hold_back_the_only_way_on(llm: LLM) -> None:
    (output,) = llm.generate(["x"], params(Grammar("choice", '["yes"]'), 1, min_tokens=50))
    assert (output.text, output.finish_reason) == ("yes", "stop")


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    choice = params(Grammar("choice", '["zebra"]'), 1, logprobs=2, temperature=0.0)
    (output,) = llm.generate(["def f(x):\n    return "], choice)
    assert output.text == "zebra"
    assert output.logprobs[0].sampled.logprob < -3, "by itself the model would not have said that"
    assert output.logprobs[0].top[0].logprob > output.logprobs[0].sampled.logprob


def test_a_wrong_grammar_is_refused_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="grammar or schema") as refused:
        llm.generate(["x"], params(Grammar("json_schema", '{"type": "nonsense"}'), 1))
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    assert llm.generate(["x"], params(Grammar("choice", '["yes"]'), 1))[0].text == "yes"


def test_a_grammar_that_gives_out_ends_its_request_alone() -> None:
    # Every further character of the text is another state: a few more than there may be.
    states = {"grammar.llguidance": {"max_lexer_states": 300}}
    greedy = Grammar("regex", "[^\\n]*x[^\\n]{250}[^\\n]{250}")
    with LLM(progress=False, config={"plugins": {"options": states}}) as llm:
        with pytest.raises(RequestError, match="cannot go on") as failed:
            llm.generate(["xxxx"], params(greedy, 1, max_tokens=1500, temperature=2.0))
        assert failed.value.code == "grammar_failed"
        assert llm.generate(["x"], params(Grammar("choice", '["yes"]'), 1))[0].text == "yes"


@pytest.mark.slow
def test_executors_in_processes_of_their_own_follow_grammars_too(alone: list[str]) -> None:
    with LLM(progress=False, config={"placement": {"executor": "process"}}) as llm:
        assert [output.text for output in llm.generate(PROMPTS[:4], mixed()[:4])] == alone[:4]
