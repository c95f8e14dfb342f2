"""From request fields to sampling parameters, without a server."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from engine.types.params import MAX_SEED
from server.generate.generation import Generation, choice_seed
from server.http.body import UNSUPPORTED, BodyReader, name_field
from server.model_card import ModelCard
from server.openai.chat import Chat
from server.openai.completions import CompletionsEndpoint
from server.openai.requests import ChatBody, CompletionBody, GenerationBody
from server.openai.translator import Translator, own_seed

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def completion(chat_defaults: dict[str, float | int] | None = None, **fields: object) -> Generation:
    card = ModelCard(name="m", max_model_len=100, vocab_size=50, created=0, chat_defaults=chat_defaults or {})
    body = msgspec.convert({"model": "m", "prompt": "p", **fields}, CompletionBody)
    return CompletionsEndpoint(Translator(card)).translate(body)


def chat(**fields: object) -> Generation:
    card = ModelCard(name="m", max_model_len=100, vocab_size=50, created=0, chat_defaults=DEFAULTS)
    messages = [{"role": "user", "content": "p"}]
    body = msgspec.convert({"model": "m", "messages": messages, **fields}, ChatBody)
    return Chat(Translator(card)).translate(body)


def test_defaults_are_those_of_the_api() -> None:
    params = completion().params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert chat().params.max_tokens is None


def test_the_models_own_defaults_fill_what_a_request_leaves_out() -> None:
    for params in (completion(DEFAULTS).params, chat().params, chat(temperature=None, top_k=None).params):
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.95, 20, 1.05)
    params = chat(temperature=0, top_p=1, top_k=-1, repetition_penalty=1).params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.0, 1.0, -1, 1.0)


def test_every_field_arrives() -> None:
    generation = completion(
        max_tokens=9,
        min_tokens=2,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={4: -7},
        seed=3,
        logprobs=2,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-4,
        cache_salt="tenant",
    )
    params = generation.params
    assert (params.max_tokens, params.min_tokens, params.min_p, params.seed, params.logprobs) == (9, 2, 0.1, 3, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.2, 0.3, {4: -7.0})
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (5,))
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert (generation.options.priority, generation.options.cache_salt) == (-4, "tenant")


def test_one_stop_string_is_a_list_of_one() -> None:
    assert completion(stop="end").params.stop == ("end",)


def test_the_newer_name_of_max_tokens_goes_first() -> None:
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7


def test_chat_logprobs_need_to_be_asked_for() -> None:
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None


@pytest.mark.parametrize(
    "fields, param", [({"n": 257}, "n"), ({"n": 128, "prompt": ["a"] * 3}, "n"), ({"prompt": ["a"] * 257}, "prompt")]
)
def test_too_many_choices_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@given(st.integers(0, MAX_SEED))
def test_choice_seeds_are_seeds_and_differ(seed: int) -> None:
    seeds = [choice_seed(seed, k) for k in range(256)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 256
    assert all(0 <= one <= MAX_SEED for one in seeds if one is not None)
    assert [choice_seed(seed, k) for k in range(256)] == seeds


def test_no_seed_stays_no_seed() -> None:
    assert choice_seed(None, 5) is None
    assert own_seed(None) is None


@given(st.integers(-MAX_SEED, -2))
def test_a_negative_seed_is_a_seed_of_its_own(seed: int) -> None:
    assert 0 <= (ours := own_seed(seed) or 0) <= MAX_SEED
    assert own_seed(ours) == ours
    assert own_seed(seed - 1) != ours


def test_a_seed_of_minus_one_is_none() -> None:
    assert own_seed(-1) is None


def test_a_seed_beyond_64_bits_is_left_to_be_refused() -> None:
    assert own_seed(-MAX_SEED - 1) == 0
    assert own_seed(-MAX_SEED - 2) == -MAX_SEED - 2
    assert own_seed(MAX_SEED + 1) == MAX_SEED + 1


@pytest.mark.reliability("U3", "any bytes as a request's body")
@given(st.binary(max_size=200))
async def test_any_bytes_are_understood_or_refused(body: bytes) -> None:
    reader = BodyReader(CompletionBody, lambda body: body, ServerSection())
    with pytest.raises(RequestError) as caught:
        await reader.understand(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED) - set(GenerationBody.__struct_fields__)))
async def test_neutral_values_of_unsupported_fields_pass(name: str) -> None:
    reader = BodyReader(GenerationBody, lambda body: body, ServerSection())
    for value in (None, False, "", [], {}, *UNSUPPORTED[name]):
        await reader.understand(msgspec.json.encode({"model": "m", name: value}))
    for value in (0, True, 1.5, "x", [0], {"type": "json_object"}):
        if value in UNSUPPORTED[name]:
            continue
        with pytest.raises(RequestError) as caught:
            await reader.understand(msgspec.json.encode({"model": "m", name: value}))
        assert caught.value.param == name


@pytest.mark.parametrize(
    "complaint, named",
    [
        ("Expected `int | null`, got `str` - at `$.n`", ("n: Expected int | null, got str", "n")),
        (
            "Object missing required field `model`",
            ("model: required, but not given; GET /v1/models lists what this server has", "model"),
        ),
        (
            "Object missing required field `role` - at `$.messages[3]`",
            ("messages[3].role: required, but not given", "messages[3].role"),
        ),
        ("Expected `int`, got `str` - at `key` in `$.logit_bias`", ("logit_bias: Expected int, got str", "logit_bias")),
        ("Expected `object`, got `array`", ("the body: Expected object, got array", None)),
    ],
)
def test_complaints_name_the_field(complaint: str, named: tuple[str, str | None]) -> None:
    assert name_field(complaint) == named
