"""From a conversation to thoughts and an answer through the tokenizer actor: what the prompt leaves open decides."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.actors.tokenizer import Tokenizer
from engine.features.grammar.grammars import GrammarCache
from engine.messages import Abort, Admit, Deltas, Failed, Finish, RequestOptions, Stop, Tokenize, Tokens
from engine.text.codec import Formats, TextCodec
from engine.text.forms import OutputForms
from engine.text.reasoning import THINK
from engine.types.errors import RequestError
from engine.types.params import Grammar, SamplingParams
from engine.types.prompt import ChatOptions, ChatTurn

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if thinking == 'open' %}<think>\n{% elif thinking == 'over' %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
EOS = 2


class Sent:
    """A link that keeps what was put."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def put(self, message: Any) -> None:
        self.messages.append(message)


class Refusing:
    """A grammar engine that remembers what it was asked and refuses one source."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []

    def compile(self, grammar: Grammar) -> Any:
        self.asked.append(grammar)
        if grammar.source == "wrong":
            raise RequestError("not a grammar", code="invalid_grammar")
        return type("Compiled", (), {"num_bytes": 1, "matcher": id})()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("thinking")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return TextCodec.load(directory, lambda _: Formats(reasoning_parser="think", reasoning=THINK))


async def converse(
    codec: TextCodec, output: str, options: ChatOptions, **params: Any
) -> tuple[Any, list[Any], list[Any], Refusing]:
    """(the request as the scheduler got it, deltas, failures, the engine) of one conversation."""
    engine = Refusing()
    grammars = GrammarCache(lambda: engine)
    tokenizer = Tokenizer(capacity=10_000, codec=codec, vocab_size=codec.vocab_size, forms=OutputForms(grammars))
    scheduler, ingress = Sent(), Sent()
    tokenizer.connect(scheduler=scheduler, ingress=ingress)
    running = asyncio.create_task(tokenizer.run())
    request = SamplingParams(max_tokens=100, **params)
    tokenizer.inbox.put(
        Tokenize(request_id=1, params=request, turns=(ChatTurn("user", "hi"),), options=RequestOptions(chat=options))
    )
    while not scheduler.messages and not ingress.messages:
        await asyncio.sleep(0)
    admitted = scheduler.messages[0] if scheduler.messages else None
    if admitted is not None:
        ids = [*codec.encode(output).tolist(), EOS]
        for index, token in enumerate(ids):
            finish = Finish.STOP if index == len(ids) - 1 else Finish.RUNNING
            lines, tokens = np.array([1], np.int64).tobytes(), np.array([token], np.int32).tobytes()
            tokenizer.inbox.put(Tokens(request_ids=lines, token_ids=tokens, finishes=bytes([finish])))
    tokenizer.inbox.put(Stop())
    await running
    assert all(isinstance(message, Admit | Abort) for message in scheduler.messages)
    deltas = [delta for message in ingress.messages if isinstance(message, Deltas) for delta in message.deltas]
    return admitted, deltas, [message for message in ingress.messages if isinstance(message, Failed)], engine


def told(deltas: list[Any]) -> tuple[str, str]:
    return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas)


def options(thinking: str, split: bool = True) -> ChatOptions:
    return ChatOptions(variables=f'{{"thinking": "{thinking}"}}', split_reasoning=split)


@pytest.mark.parametrize(
    "thinking, output, reasoning, text",
    [
        ("open", "let me see\n</think>\n\nyes", "let me see", "yes"),
        ("none", "<think>\nlet me see</think>yes", "\nlet me see", "yes"),
        ("none", "yes", "", "yes"),
        ("over", "yes </think>", "", "yes </think>"),
        ("open", "without end", "without end", ""),
    ],
)
async def test_what_the_prompt_leaves_open_decides(
    codec: TextCodec, thinking: str, output: str, reasoning: str, text: str
) -> None:
    _, deltas, _, _ = await converse(codec, output, options(thinking))
    assert told(deltas) == (reasoning, text)
    assert (deltas[-1].usage.reasoning_tokens > 0) == bool(reasoning)
    assert deltas[-1].usage.reasoning_tokens <= deltas[-1].usage.completion_tokens


@pytest.mark.parametrize("content, expected", [("<think>a b", "open"), ("<think>a</think>b", "none"), ("b", "none")])
def test_a_message_may_go_on_in_the_middle_of_a_thought(codec: TextCodec, content: str, expected: str) -> None:
    turns = [ChatTurn("user", "What is <think>?"), ChatTurn("assistant", content)]
    chat = codec.encode_chat(turns, ChatOptions(add_generation_prompt=False, continue_final=True))
    assert chat.thinking == expected


async def test_thoughts_stay_in_the_text_if_that_is_wanted(codec: TextCodec) -> None:
    _, deltas, _, _ = await converse(codec, "a</think>b", options("open", split=False))
    assert told(deltas) == ("", "a</think>b")


async def test_a_stop_string_is_looked_for_in_the_answer_alone(codec: TextCodec) -> None:
    _, deltas, _, _ = await converse(codec, "stop here</think>go on and stop here", options("open"), stop=("stop",))
    assert told(deltas) == ("stop here", "go on and ")
    assert deltas[-1].stop_reason == "stop"


@pytest.mark.parametrize("thinking, expected", [("open", "open"), ("none", "optional"), ("over", "none")])
async def test_a_grammar_knows_where_the_prompt_leaves_the_model(
    codec: TextCodec, thinking: str, expected: str
) -> None:
    grammar = Grammar("regex", "a")
    admitted, _, _, engine = await converse(codec, "a", options(thinking), grammar=grammar)
    assert admitted.params.grammar == Grammar("regex", "a", expected)
    assert engine.asked == [admitted.params.grammar], "what was checked is what will be followed"


async def test_a_wrong_grammar_never_reaches_the_scheduler(codec: TextCodec) -> None:
    admitted, deltas, failures, _ = await converse(codec, "a", options("none"), grammar=Grammar("regex", "wrong"))
    assert (admitted, deltas) == (None, [])
    assert [(failure.status, failure.code) for failure in failures] == [(400, "invalid_grammar")]
