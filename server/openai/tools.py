"""Tools and tool_choice: what the model is told, what it must do, how its output is read.

Owns: their rules, and which parser an output gets.  Does not know: how calls are written or parsed, messages.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from engine.errors import FieldError
from engine.params import Grammar
from engine.text.tool_calls import ToolCallParser
from engine.text.tool_format import Tool, ToolFormat, allow_calls, demand_calls
from server.openai.requests import ToolBody, ToolChoice

Choice = str | ToolChoice | None


class ToolRequest(msgspec.Struct, frozen=True):
    """The functions that may be called, as a template describes them and as a parser finds them.

    described: JSON for the template; empty for none.  names: functions whose calls are looked for; empty for none.
    max_calls: later ones are dropped; None for no limit.  callable_tools: what may be called, with the schemas that
    are to be followed.  forced: a call must come.  strict: some schema was asked to be followed to the letter."""

    described: str = ""
    form: ToolFormat = "hermes"
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    callable_tools: tuple[Tool, ...] = ()
    forced: bool = False
    strict: bool = False

    def new_parser(self, grammar: Grammar | None) -> Callable[[], ToolCallParser] | None:
        """Returns what makes a parser for an output of this grammar; None if no call is looked for."""
        if not self.names:
            return None
        exact = grammar is not None
        return partial(ToolCallParser, self.form, self.names, self.max_calls, exact=exact, forced=self.forced)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Returns what the output must look like.  answer: the same if it is no call; None if it is free."""
        if not self.names:
            return answer
        many = self.max_calls is None
        if self.forced:
            return demand_calls(self.callable_tools, self.form, many=many)
        if answer is None and not self.strict:
            return None
        return allow_calls(self.callable_tools, self.form, answer, many=many)


NO_TOOLS: Final = ToolRequest()


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Choice, *, parallel: bool | None, form: ToolFormat
) -> ToolRequest:
    """Returns what ``tools`` and ``tool_choice`` say together.  Raises RequestError."""
    forced = choice == "required" or isinstance(choice, ToolChoice)
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
        names=frozenset(names),
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
