"""A conversation in the engine's terms: its messages, its tools, and the variables of its chat template.

Owns: roles, content parts, calls of earlier turns, names of template variables, the rules of tools and tool_choice.
Does not know: templates, answers, how calls are written or parsed.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from engine.plugins.tool_parser.hermes import HermesFormat
from engine.text.tool_calls import ToolCallParser, ToolFormat
from engine.text.tool_format import Tool
from engine.types.errors import FieldError, RequestError
from engine.types.params import Grammar
from engine.types.prompt import ChatTurn, Picture, ToolCall
from server.http.body import is_given
from server.openai.content import Content, GivenPicture, read_address, read_film
from server.openai.requests import CallBody, ChatMessage, ContentPart, ToolBody, ToolChoice

log = logging.getLogger(__name__)

# The API renamed "system" to "developer"; templates of open models know only the old name.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
VARIABLES = "chat_template_kwargs"
TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
PICTURE_TYPES = frozenset({"image_url", "input_image", "computer_screenshot"})
FILM_TYPES = frozenset({"video_url", "video", "input_video"})
# Types of parts, in all APIs, that other models could read -> what they are.
UNREADABLE = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio_url", "input_audio"), "sound"),
    **dict.fromkeys(("video_url", "video", "input_video"), "video"),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), "file"),
}
Choice = str | ToolChoice | None
HERMES: Final = HermesFormat()


def read_turns(
    messages: Sequence[ChatMessage], template_roles: Collection[str] = (), *, sees: bool = False
) -> tuple[ChatTurn, ...]:
    """The conversation in the engine's terms.  template_roles: those that the chat template has beside the usual ones.

    sees: the model reads pictures.  Raises RequestError for what only other models could read."""
    if not messages:
        raise FieldError("messages", "an empty list; expected at least one message")
    # What the API calls "developer" is the system to templates of open models, but for those that have the word.
    roles = {**ROLES, **{role: role for role in template_roles}}
    answered = num_answered([message.role for message in messages])
    return tuple(
        _turn(message, f"messages[{index}]", roles, past=index < answered, sees=sees)
        for index, message in enumerate(messages)
    )


def num_answered(roles: Sequence[str | None]) -> int:
    """Returns how many messages there are up to the assistant's last one.

    The very last message does not count as one: the answer may go on there."""
    return next((index for index in range(len(roles) - 2, 0, -1) if roles[index] == "assistant"), 0)


def read_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> tuple[bool, bool]:
    """(the assistant begins an answer, its last message goes on).  Raises RequestError if both are asked for."""
    if continue_final_message and add_generation_prompt:
        raise FieldError("add_generation_prompt", "not possible together with continue_final_message")
    continues = bool(continue_final_message)
    return (not continues if add_generation_prompt is None else add_generation_prompt), continues


def read_variables(given: Mapping[str, object] | None, reasoning_effort: str | None, allowed: Collection[str]) -> str:
    """The template's variables as a JSON object; empty for none.  Raises RequestError for a name that is not allowed.

    A template is a program, so clients cannot set whatever it reads: only what the configuration lists."""
    variables = dict(given or {})
    for name in variables:
        if name not in allowed:
            raise RequestError(
                f"{VARIABLES}.{name[:100]}: not taken; known are {', '.join(allowed)} "
                "(server.allowed_template_variables)",
                code="unsupported_parameter",
                param=VARIABLES,
            )
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    return msgspec.json.encode(variables).decode() if variables else ""


def _turn(message: ChatMessage, path: str, roles: Mapping[str, str], *, past: bool, sees: bool) -> ChatTurn:
    role = roles.get(message.role)
    if role is None:
        raise FieldError(f"{path}.role", f"must be one of {', '.join(roles)}")
    if is_given(message.function_call):
        raise FieldError(
            f"{path}.function_call", "not supported by this server; send tool_calls", code="unsupported_parameter"
        )
    calls = message.tool_calls or ()
    if calls and role != "assistant":
        raise FieldError(f"{path}.tool_calls", "only the assistant calls functions")
    if role == "tool" and not message.tool_call_id:
        where = f"{path}.tool_call_id"
        raise FieldError(where, "required, but not given; the id of the call that this answers")
    reasoning = message.reasoning_content or message.reasoning or ""
    content = _content(message, path, required=role != "assistant", past=past or role == "tool", sees=sees)
    return ChatTurn(
        role,
        content.text,
        reasoning=reasoning,
        tool_calls=tuple(
            read_call(call, f"{path}.tool_calls[{index}].function.arguments") for index, call in enumerate(calls)
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        pictures=content.pictures,
        places=content.places,
    )


def _content(message: ChatMessage, path: str, *, required: bool, past: bool, sees: bool) -> Content:
    if isinstance(message.content, str):
        return Content(message.content)
    if not message.content:
        if required:
            raise FieldError(f"{path}.content", "required, but not given")
        return Content()
    return read_parts(message.content, f"{path}.content", past=past, sees=sees)


def read_parts(parts: Sequence[ContentPart], path: str, *, past: bool, sees: bool) -> Content:
    """The content of parts.  past: they are a tool's, or were answered before: what cannot be read there must not end a
    conversation.  sees: the model reads pictures.

    Raises RequestError for images and the like elsewhere."""
    return Content.of(_part(part, f"{path}[{index}]", past=past, sees=sees) for index, part in enumerate(parts))


def _part(part: ContentPart, path: str, *, past: bool, sees: bool) -> str | Picture:
    if part.type == "refusal":
        return needed(part.refusal, f"{path}.refusal")
    if sees and part.type in PICTURE_TYPES:
        return _picture(part, path)
    if sees and part.type in FILM_TYPES:
        return _film(part, path)
    if past and (told := left_out_note(part.type)):
        return told
    if part.type not in TEXT_TYPES:
        served = "models read and write text alone here, no images, sound or files; send parts of type 'text'"
        if sees:
            served = (
                "the model reads text, images and videos, no sound or files; send parts of type 'text', 'image_url' or "
                "'video_url'"
            )
        raise FieldError(f"{path}.type", f"'{part.type[:40]}' is not served: {served}", code="unsupported_content")
    return needed(part.text, f"{path}.text")


def _picture(part: ContentPart, path: str) -> Picture:
    """Returns the picture of a part: an address, text or in an object, or the id of a file.  Raises RequestError."""
    if part.file_id is not None:
        return GivenPicture.of("file", part.file_id, f"{path}.file_id", detail=part.detail)
    if isinstance(part.image_url, dict):
        detail = part.image_url.get("detail")
        if not isinstance(detail, str | None):
            raise FieldError(f"{path}.image_url.detail", "must be text")
        return read_address(part.image_url.get("url"), f"{path}.image_url.url", detail)
    return read_address(part.image_url, f"{path}.image_url", part.detail)


def _film(part: ContentPart, path: str) -> Picture:
    """Returns the film of a part: an address, text or in an object, its frames, or the id of a file."""
    if part.file_id is not None:
        return msgspec.structs.replace(GivenPicture.of("file", part.file_id, f"{path}.file_id"), moves=True)
    name = "video" if part.video is not None else "video_url"
    given = getattr(part, name)
    if isinstance(given, dict):
        return read_film(given.get("url"), f"{path}.{name}.url", given.get("fps", part.fps))
    return read_film(given, f"{path}.{name}", part.fps)


def left_out_note(kind: str) -> str:
    """Returns what stands in the place of a part that the model cannot read; empty for a type that is not known."""
    noun = UNREADABLE.get(kind)
    return f"[{noun} left out: this model reads text]" if noun else ""


def needed(value: str | None, path: str) -> str:
    """Returns a field's value.  Raises RequestError if it was not given."""
    if value is None:
        raise FieldError(path, "required, but not given")
    return value


def read_call(call: CallBody, path: str) -> ToolCall:
    """A call of an earlier turn; templates want its arguments as an object.  path: of the arguments.

    A call that was cut off has arguments that are none.  Its conversation goes on with an error as the call's result,
    so the template sees a call without arguments.  Raises RequestError for what no model could have written."""
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        return ToolCall(call.id, call.function.name, msgspec.json.encode(arguments).decode())
    try:
        msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except RecursionError:
        raise FieldError(path, "nested too deep") from None
    except msgspec.MsgspecError:
        if _has_lone_surrogate(arguments or ""):
            raise FieldError(path, "holds half of a surrogate pair, which is no text") from None
        arguments = None
    return ToolCall(call.id, call.function.name, arguments or "{}")


def _has_lone_surrogate(text: str) -> bool:
    """Whether it would be JSON but for one."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The functions that may be called, as a template describes them and as a parser finds them.

    described: JSON for the template; empty for none.  form: how the model writes calls.
    tools: functions whose calls are looked for, with their schemas; empty for none.
    max_calls: later ones are dropped; None for no limit.  callable_tools: what may be called, with the schemas that
    are to be followed.  forced: a call must come.  strict: some schema was asked to be followed to the letter."""

    described: str = ""
    form: ToolFormat = HERMES
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    callable_tools: tuple[Tool, ...] = ()
    forced: bool = False
    strict: bool = False

    def new_parser(self, grammar: Grammar | None) -> Callable[[], ToolCallParser] | None:
        """Returns what makes a parser for an output of this grammar; None if no call is looked for."""
        if not self.tools:
            return None
        form = self.form if grammar is None else self._demanded

        def new_parser() -> ToolCallParser:
            parser = form.parser(self.tools, exact=grammar is not None)
            return ToolCallParser(parser, self.max_calls, forced=self.forced)

        return new_parser

    @property
    def _demanded(self) -> ToolFormat:
        """The format of a grammar: a model that must keep to one can write calls in any."""
        return self.form if self.form.constrains else HERMES

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Returns what the output must look like.  answer: the same if it is no call; None if it is free."""
        if not self.tools:
            return answer
        # A format without grammars is not left for hermes where text is free: the model would write its own there.
        if not self.forced and answer is None and not (self.strict and self.form.constrains):
            return None
        many = self.max_calls is None
        return self._demanded.grammar(self.callable_tools, answer, many=many, forced=self.forced)


NO_TOOLS: Final = ToolRequest()


@cache
def warn_left_out(kind: str) -> None:
    """Log, once for each kind of tool, that a request's tools of it are left out.  kind: of those that are known."""
    log.warning("tools of type %s cannot be run here: they are left out, and the model does not see them", kind)


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Choice, *, parallel: bool | None, form: ToolFormat
) -> ToolRequest:
    """Returns what ``tools`` and ``tool_choice`` say together.  Raises RequestError."""
    forced = choice in ("required", "any") or isinstance(choice, ToolChoice)
    if not tools:
        if forced:
            raise FieldError("tool_choice", "there are no tools to choose from")
        return NO_TOOLS
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "two of them have the same name")
    if choice == "none":
        return NO_TOOLS
    # A call that is not demanded keeps to a schema only where that was asked for: others may have words that are not
    # understood, which is no reason to refuse a request that would never have needed them.
    callable_tools = [
        Tool(tool.function.name, (tool.function.parameters or {}) if forced or tool.function.strict else {})
        for tool in tools
    ]
    if isinstance(choice, ToolChoice):
        callable_tools = [tool for tool in callable_tools if tool.name == choice.function.name]
        if not callable_tools:
            raise FieldError("tool_choice.function.name", "none of the tools has this name")
    many = parallel is not False and not isinstance(choice, ToolChoice)
    return ToolRequest(
        described=msgspec.json.encode([_described(tool) for tool in tools]).decode(),
        form=form,
        tools=tuple(Tool(tool.function.name, tool.function.parameters or {}) for tool in tools),
        max_calls=None if many else 1,
        callable_tools=tuple(callable_tools),
        forced=forced,
        strict=any(tool.function.strict for tool in tools),
    )


def _described(tool: ToolBody) -> dict[str, object]:
    """Returns a tool without what was not given: templates write all that is there into the prompt."""
    function = {
        name: value
        for name in ("name", "description", "parameters")
        if (value := getattr(tool.function, name)) is not None
    }
    return {"type": "function", "function": function}
