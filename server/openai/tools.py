"""Tools and tool_choice: what the model is told, what it must do, how its output is read.

Owns: their rules.  Does not know: how calls are written or parsed, messages.
"""

from collections.abc import Sequence

import msgspec

from engine.errors import RequestError
from engine.params import Grammar
from engine.text.tool_format import Tool, ToolFormat, allow_calls, demand_calls
from server.generate.generation import ToolUse
from server.openai.requests import ToolBody, ToolChoice

Choice = str | ToolChoice | None


class ToolRequest(msgspec.Struct, frozen=True):
    """described: JSON for the template, empty for none.  use: None if no call is looked for.
    callable_tools: what may be called, with the schemas that are to be followed.  forced: a call must come.
    strict: some schema was asked to be followed to the letter."""

    described: str = ""
    use: ToolUse | None = None
    callable_tools: tuple[Tool, ...] = ()
    forced: bool = False
    strict: bool = False

    def use_with(self, grammar: Grammar | None) -> ToolUse | None:
        """``use`` for an output of this grammar."""
        return None if self.use is None else msgspec.structs.replace(self.use, exact=grammar is not None)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """What the output must look like.  answer: what it must look like if it is no call; None if it is free."""
        if self.use is None:
            return answer
        many = self.use.max_calls is None
        if self.forced:
            return demand_calls(self.callable_tools, self.use.form, many=many)
        if answer is None and not self.strict:
            return None
        return allow_calls(self.callable_tools, self.use.form, answer, many=many)


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Choice, *, parallel: bool | None, form: ToolFormat
) -> ToolRequest:
    """Raises RequestError."""
    forced = choice == "required" or isinstance(choice, ToolChoice)
    if not tools:
        if forced:
            raise RequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        return ToolRequest()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools: two of them have the same name", param="tools")
    if choice == "none":
        return ToolRequest()
    # A call that nobody demands keeps to a schema only where that was asked for: others may have words that are not
    # understood, which is no reason to refuse a request that would never have needed them.
    callable_tools = [
        Tool(tool.function.name, (tool.function.parameters or {}) if forced or tool.function.strict else {})
        for tool in tools
    ]
    if isinstance(choice, ToolChoice):
        callable_tools = [tool for tool in callable_tools if tool.name == choice.function.name]
        if not callable_tools:
            raise RequestError(
                "tool_choice.function.name: none of the tools has this name", param="tool_choice.function.name"
            )
    many = parallel is not False and not isinstance(choice, ToolChoice)
    return ToolRequest(
        described=msgspec.json.encode([_described(tool) for tool in tools]).decode(),
        use=ToolUse(form, frozenset(names), None if many else 1, forced=forced),
        callable_tools=tuple(callable_tools),
        forced=forced,
        strict=any(tool.function.strict for tool in tools),
    )


def _described(tool: ToolBody) -> dict[str, object]:
    """Without what was not given: templates write all that is there into the prompt."""
    function = {
        name: value
        for name in ("name", "description", "parameters")
        if (value := getattr(tool.function, name)) is not None
    }
    return {"type": "function", "function": function}
