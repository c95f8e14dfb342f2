"""The official client, over a real socket: what most users will talk to the server with."""

import asyncio
from collections.abc import Iterator

import msgspec
import openai
import pytest

from engine.settings.sections import LimitsSection, ServerSection
from tests.server.fake_ingress import FakeIngress, as_text
from tests.server.live_server import CARD, MODEL, LiveServer, connect

pytestmark = pytest.mark.reliability("H5", "the official client: answers, streams, refusals, failures, retries")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(live) as client:
        yield client


def test_completion_answers_with_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello there", max_tokens=5)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert [choice.finish_reason for choice in answer.choices] == ["length"]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_answers_with_a_message(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "omega"])
def test_completion_stream_says_what_the_answer_says(client: openai.OpenAI, n: int, stop: str | None) -> None:
    request = {"model": MODEL, "prompt": ["one", "two"], "n": n, "seed": 5, "max_tokens": 40, "stop": stop}
    whole = client.completions.create(**request)
    texts, reasons = {}, {}
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert sorted(texts) == list(range(2 * n))


@pytest.mark.parametrize("n", [1, 4])
def test_chat_stream_says_what_the_answer_says(client: openai.OpenAI, n: int) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "n": n, "seed": 5, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**request)
    texts, logprobs, roles = [""] * n, [[] for _ in range(n)], [0] * n
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert roles == [1] * n
    assert usage == whole.usage


def test_prompts_of_every_form(client: openai.OpenAI) -> None:
    def texts(prompt: object) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
        return [choice.text for choice in answer.choices]

    assert texts("1 2 3") == texts(["1 2 3"]) == texts([1, 2, 3]) == texts([[1, 2, 3]])
    assert texts([[1, 2], [3]]) == texts("1 2") + texts("3")


def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=1, max_tokens=6)
    alone = [client.completions.create(model=MODEL, prompt=p, n=2, seed=1, max_tokens=6) for p in ("a", "b")]
    assert [c.text for c in answer.choices] == [c.text for one in alone for c in one.choices]
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert answer.usage.completion_tokens == 24


def test_seeded_choices_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts(n: int) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="p", n=n, seed=11, max_tokens=10)
        return [choice.text for choice in answer.choices]

    assert len(set(texts(4))) == 4
    assert texts(4) == texts(4)
    assert texts(1) == texts(4)[:1]


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="hello", max_tokens=4)
    echoed = client.completions.create(model=MODEL, prompt="hello", max_tokens=4, echo=True)
    assert echoed.choices[0].text == "hello" + plain.choices[0].text


def test_content_parts_are_joined(client: openai.OpenAI) -> None:
    def text(content: object) -> str | None:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
        return answer.choices[0].message.content

    assert text("hello") == text([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])


async def test_sixteen_streams_at_once() -> None:
    with LiveServer(FakeIngress(delay_s=0.005)) as live:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

            async def stream(number: int) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model=MODEL, prompt=f"number {number}", max_tokens=10, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            async def whole(number: int) -> str:
                answer = await client.completions.create(model=MODEL, prompt=f"number {number}", max_tokens=10)
                return answer.choices[0].text

            streamed = await asyncio.gather(*map(stream, range(16)))
            answered = await asyncio.gather(*map(whole, range(16)))
            assert streamed == answered
            assert len(set(streamed)) == 16
        assert live.wait_until(lambda: live.ingress.num_open == 0, 1)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.owned_by, model.root, model.parent) == ("callboard", MODEL, None)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_raise_bad_request_with_the_field(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=stream)
    assert (caught.value.status_code, caught.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": 3}], stream=stream)
    assert caught.value.param == "messages[0].content"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[{"type": "function"}], stream=stream)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "tools[0].function")


def test_refusals_after_tokenising_have_a_status_even_for_streams(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="!refuse", stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_the_prompt_is_called_messages_in_chat_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 9000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="x" * 5000, prompt="p")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "x" * 100 in str(caught.value)
    assert "x" * 101 not in str(caught.value)


@pytest.mark.parametrize("prompt", ["!fail", "!die", "!late-bug"])
def test_failure_inside_a_stream_raises_after_the_text_so_far(client: openai.OpenAI, prompt: str) -> None:
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, stream=True)
    chunks = [next(stream)]
    with pytest.raises(openai.APIError) as caught:
        chunks += stream
    assert chunks[0].choices
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["!fail", "!die", "!late-bug", "!bug"])
def test_failure_without_a_stream_is_a_500(client: openai.OpenAI, prompt: str) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=9)
    assert "secret" not in str(caught.value)
    assert client.completions.create(model=MODEL, prompt="still there").choices[0].text


def test_full_queue_raises_rate_limit_and_a_retry_succeeds() -> None:
    ingress = FakeIngress(delay_s=0.05)
    with (
        LiveServer(ingress, limits=LimitsSection(max_requests=1)) as live,
        connect(live) as client,
        connect(live, retries=2) as patient,
    ):
        stream = client.completions.create(model=MODEL, prompt="first", max_tokens=10, stream=True)
        next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="second")
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        assert patient.completions.create(model=MODEL, prompt="third", max_tokens=2).choices
        stream.close()


def test_a_queue_that_fills_up_between_choices_leaves_none_open() -> None:
    ingress = FakeIngress(delay_s=0.05, max_requests=2)
    with LiveServer(ingress) as live, connect(live) as client:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="p", n=3)
        assert live.call(lambda: ingress.num_open) == 0
        assert len(ingress.opened) == 2


@pytest.mark.parametrize("key", ["wrong", "s3cre", "s3crett"])
def test_wrong_key_raises_authentication_error(key: str) -> None:
    with LiveServer(server=ServerSection(api_key="s3cret")) as live, connect(live, key) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")


def test_right_key_lets_in() -> None:
    with LiveServer(server=ServerSection(api_key="s3cret")) as live, connect(live, "s3cret") as client:
        assert client.completions.create(model=MODEL, prompt="p").choices


def test_conversations_reach_the_engine_in_its_own_words(live: LiveServer, client: openai.OpenAI) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "name": "x"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "r"}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    prompt, _, _ = live.call(lambda: live.ingress.asked[-1])
    assert as_text(prompt) == "system: d\nuser: u\nassistant: a\nassistant: \nassistant: r\ntool: t"


def test_roles_are_those_that_the_template_has() -> None:
    card = msgspec.structs.replace(CARD, template_roles=("developer", "critic"))
    messages = [{"role": "critic", "content": "c"}, {"role": "developer", "content": "d"}]
    with LiveServer(card=card) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        client.chat.completions.create(model=MODEL, messages=messages)
        assert as_text(live.call(lambda: live.ingress.asked[-1])[0]) == "critic: c\ndeveloper: d"
        messages[0]["role"] = "robot"
        with pytest.raises(openai.BadRequestError, match="critic") as refused:
            client.chat.completions.create(model=MODEL, messages=messages)
        assert refused.value.param == "messages[0].role"
