"""Chat templates, which turn a conversation into the text format that a model was trained on.

Owns: compiling a checkpoint's Jinja template in a sandbox, and turning its failures into refusals of one request.
Does not know: tokens, HTTP.  Clients cannot bring templates.

The environment is the one transformers gives templates (``apply_chat_template``): block trimming, loop controls,
``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, and ``generation`` blocks, which only matter
for training.  Rendering is bounded in time and in its output, and belongs in a worker thread.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from itertools import pairwise, takewhile
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from engine.text.bounded_jinja import BoundedEnvironment
from engine.text.tool_format import explains_tools, explanation
from engine.types.errors import RequestError, WeightsError
from engine.types.prompt import ChatOptions, ChatTurn

_MAX_REASON_CHARS: Final = 500
OUTPUT_PER_INPUT: Final = 4  # characters that a template may output per character of input
LEAST_OUTPUT_CHARS: Final = 1 << 20
_END: Final = "\ue000end\ue000"  # in a private use area of Unicode, which no template writes
_SYSTEM: Final = frozenset({"system", "developer"})
_ROLES: Final = re.compile(r"""\brole['"\]]*\s*(?:==|!=|in)\s*[\[(]?((?:\s*,?\s*['"]\w+['"])+)""")
_TYPED: Final = re.compile(r"""\['type'\]|\["type"\]|\.type\b|['"]type['"]""")  # in templates that read parts
PLAIN: Final = ChatOptions()


class ChatTemplate:
    """One compiled template.  source: its text."""

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile the template.  Raises WeightsError if it is not valid Jinja.

        origin: the file, for messages.  variables: bos_token and the like.  now: the clock of ``strftime_now``."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["namespace"] = _PlainNamespace
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        environment.bound_filters()
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise WeightsError(
                f"{origin}: the chat template is broken at line {error.lineno}: {error.message}"
            ) from None
        self._variables = {**variables, "tools": None, "documents": None}
        self._explains_tools = explains_tools(source)
        self.source = source
        typed = _TYPED.search(source) is not None
        self._wants_parts = typed and not self._shows(in_parts=False) and self._shows(in_parts=True)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the template compares a message's role with."""
        named = (role for found in _ROLES.findall(self.source) for role in re.findall(r"\w+", found))
        return tuple(dict.fromkeys(named))

    def render(self, turns: Sequence[ChatTurn], options: ChatOptions = PLAIN) -> str:
        """Return the text up to where the assistant's answer begins or continues.

        A template may refuse system messages after the first, or all of them, or silently drop them; then it gets
        the turns of ``_arrangements``.  Raises RequestError if the template fails."""
        if options.continue_final:
            turns = [*turns[:-1], _marked(turns[-1])]
        tools = msgspec.json.decode(options.tools) if options.tools else None
        if tools and not self._explains_tools:
            turns = _with_system_text(turns, explanation(tools))
        variables = msgspec.json.decode(options.variables, type=dict[str, Any]) if options.variables else {}
        given = {"tools": tools, "add_generation_prompt": options.add_generation_prompt}
        text = self._arranged(turns, {**self._variables, **variables, **given})
        return _up_to_mark(text) if options.continue_final else text

    def _arranged(self, turns: Sequence[ChatTurn], variables: Mapping[str, Any]) -> str:
        """Return the text of the first arrangement that the template accepts and shows in full.

        If there is none, return the text, or raise the error, of the first one."""
        outcome: str | RequestError | None = None
        for arranged in _arrangements(turns):
            try:
                messages = [_message(turn, in_parts=self._wants_parts) for turn in arranged]
                text = self._rendered({**variables, "messages": messages})
            except RequestError as error:
                outcome = outcome or error
                continue
            if all(turn.content.strip() in text for turn in arranged[1:] if turn.role in _SYSTEM):
                return text
            outcome = outcome or text
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome or ""

    def _shows(self, *, in_parts: bool) -> bool:
        """Return whether the template shows the content of a message that is a text, or a list of parts."""
        try:
            messages = [_message(ChatTurn("user", _END), in_parts=in_parts)]
            return _END in self._rendered({**self._variables, "messages": messages, "add_generation_prompt": True})
        except RequestError:
            return False

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        given = msgspec.json.encode(variables)
        self._environment.begin(OUTPUT_PER_INPUT * len(given) + len(self.source) + LEAST_OUTPUT_CHARS)
        try:
            return self._environment.joined(self._template.generate(variables))
        except Exception as error:
            # Templates check the conversation by raising, or fail on one that they do not expect.  In both cases the
            # model cannot take this request.
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"messages: the model's chat template refuses them: {reason[:_MAX_REASON_CHARS]}", param="messages"
            ) from None


def _message(turn: ChatTurn, *, in_parts: bool) -> dict[str, Any]:
    """Return the message as transformers passes it to templates.  A field that is not set has no key.

    in_parts: its content is a list even if it has no pictures."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.pictures or in_parts:
        message["content"] = _parts(turn)
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.name:
        message["name"] = turn.name
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    return message


def _parts(turn: ChatTurn) -> list[dict[str, str]]:
    """Return the content as parts, each a text, a picture or a film."""
    bounds = (0, *turn.places, len(turn.content))
    texts = [turn.content[start:end] for start, end in pairwise(bounds)]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image" if turn.pictures[number - 1].film is None else "video"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _with_system_text(turns: Sequence[ChatTurn], text: str) -> Sequence[ChatTurn]:
    if turns and turns[0].role == "system":
        first, *others = turns
        return [msgspec.structs.replace(first, content=f"{first.content}\n\n{text}"), *others]
    return [ChatTurn("system", text), *turns]


def _arrangements(turns: Sequence[ChatTurn]) -> Iterator[Sequence[ChatTurn]]:
    """Yield the turns as they are; then with one system message, at the start; then with none.

    Other system messages become text of the user at the same place, so that the prompts of a growing conversation keep
    their beginning, and the cache serves them."""
    yield turns
    if any(turn.role in _SYSTEM for turn in turns):
        leading = list(takewhile(lambda turn: turn.role in _SYSTEM, turns))
        if leading:
            yield [reduce(_joined, leading), *_without_system(turns[len(leading) :])]
        yield _without_system(turns)


def _without_system(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Return the turns with system messages as text of the user, joined, as templates may want turns to alternate."""
    others: list[ChatTurn] = []
    for turn in turns:
        if turn.role in _SYSTEM:
            turn = ChatTurn("user", turn.content, pictures=turn.pictures, places=turn.places)
        if others and others[-1].role == turn.role == "user":
            others[-1] = _joined(others[-1], turn)
        else:
            others.append(turn)
    return others


def _joined(first: ChatTurn, second: ChatTurn) -> ChatTurn:
    """Return the first turn with the text and the pictures of both."""
    before = f"{first.content}\n\n"
    return msgspec.structs.replace(
        first,
        content=before + second.content,
        pictures=first.pictures + second.pictures,
        places=(*first.places, *(len(before) + place for place in second.places)),
    )


def _marked(turn: ChatTurn) -> ChatTurn:
    """Return the turn with a mark at the end of its text, which may also occur elsewhere in the template's output.

    Raises RequestError if there is no text."""
    if not turn.content.strip():
        raise _cannot_continue()
    return msgspec.structs.replace(turn, content=turn.content + _END)


def _up_to_mark(text: str) -> str:
    """Return the text up to the mark of the last message.  Raises RequestError if the mark is missing."""
    at = text.rfind(_END)
    if at < 0:
        raise _cannot_continue()
    return text[:at]


def _cannot_continue() -> RequestError:
    return RequestError(
        "continue_final_message: the last message is empty, or the model's chat template changes it",
        param="continue_final_message",
    )


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks text that a model is trained on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A namespace on which a hostile template cannot set Python's own hooks, such as ``__html__``."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a ``self``, as in jinja2, so that a template may use that name too.
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
