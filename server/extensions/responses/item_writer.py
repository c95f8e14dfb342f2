"""An output as items of a response, and as the events of their making.

Owns: the order of items and events.  Does not know: sockets, JSON, the engine.
The answer in one piece is what the events add up to: both are made here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.messages import Delta, Finish
from engine.text.tool_calls import CallPiece, OutputPart, ToolCallParser
from server.extensions.responses.objects import (
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
)
from server.extensions.responses.tools import Callee, call_item, function_named
from server.generate.generation import ResumePoint
from server.openai.answers import TokenLogprob, token_logprob


class ItemWriter:
    """Makes the items of one response.

    output: the items so far, of which the last one may still grow.  parser: finds calls, if they are looked for.
    known: what can be called, by the names that the model has for it.
    num_events: of the stream so far; names are made by ``origin``."""

    def __init__(self, origin: ResumePoint, parser: ToolCallParser | None, known: Mapping[str, Callee]) -> None:
        self.output: list[Item] = []
        self._origin = origin
        self._parser = parser
        self._known = known
        self._events: list[ResponseEvent] = []
        self.num_events = 0
        self._kind = ""  # of the open item
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._waiting_logprobs: list[TokenLogprob] = []
        self._callee: Callee | None = None
        self._identity = ""  # of the open item

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        """Returns the next event of the stream."""
        number, self.num_events = self.num_events, self.num_events + 1
        return ResponseEvent(type=f"response.{kind}", sequence_number=number, **fields)

    def take(self, delta: Delta) -> list[ResponseEvent]:
        """Add new output; returns its events."""
        if delta.reasoning:
            self._write("reasoning", delta.reasoning, ())
        # Logprobs are sent with the text they belong to; a token without text waits for the next one.  Where calls are
        # looked for it is not known which tokens became one, so they wait for the end.
        self._waiting_logprobs += [token_logprob(entry) for entry in delta.logprobs]
        parts: list[OutputPart] = [delta.text] if delta.text else []
        ended = delta.finish != Finish.RUNNING
        if self._parser is not None:
            parts = self._parser.push(delta.text)
            if ended:
                parts += self._parser.finish()
        for part in parts:
            if isinstance(part, str):
                self._write("message", part, self._take_logprobs() if self._parser is None else ())
            else:
                self._write_call(part)
        if ended:
            if not self.output and not self._kind:
                self._open("message")
            if self._kind == "message":
                self._logprobs += self._take_logprobs()
            cut_off = self._parser is not None and self._parser.cut_off
            self._close("incomplete" if cut_off or delta.finish != Finish.STOP else "completed")
        events, self._events = self._events, []
        return events

    def _take_logprobs(self) -> list[TokenLogprob]:
        waiting, self._waiting_logprobs = self._waiting_logprobs, []
        return waiting

    def _write(self, kind: str, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        if self._kind != kind:
            self._close("completed")
            self._open(kind)
        self._text.append(text)
        self._logprobs += logprobs
        if kind == "message":
            self._emit("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))
        else:
            self._emit("reasoning_text.delta", content_index=0, delta=text)

    def _write_call(self, piece: CallPiece) -> None:
        if piece.name is not None:
            self._close("completed")
            self._kind, self._callee = "call", self._known.get(piece.name) or function_named(piece.name)
            self._identity = self._origin.name(len(self.output))
            self._begin(call_item(self._callee, self._identity, "", "in_progress"))
        if piece.arguments:
            self._text.append(piece.arguments)
            if self._callee is not None and self._callee.kind == "function":
                self._emit("function_call_arguments.delta", delta=piece.arguments)

    def _open(self, kind: str) -> None:
        self._kind = kind
        identity = self._origin.name(len(self.output))
        if kind == "message":
            self._begin(MessageItem(id=f"msg_{identity}", status="in_progress", content=[]))
            self._emit("content_part.added", content_index=0, part=OutputText(text=""))
        else:
            self._begin(ReasoningItem(id=f"rs_{identity}", content=[], status="in_progress"))

    def _begin(self, item: Item) -> None:
        self.output.append(item)
        self._events.append(self.event("output_item.added", output_index=len(self.output) - 1, item=item))

    def _close(self, status: Status) -> None:
        """End the open item, if there is one."""
        if not self._kind:
            return
        kind, text = self._kind, "".join(self._text)
        identity = self.output[-1].id
        item: Item
        if kind == "message":
            part = OutputText(text=text, logprobs=self._logprobs)
            item = MessageItem(id=identity, status=status, content=[part])
            self._emit("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            self._emit("content_part.done", content_index=0, part=part)
        elif kind == "reasoning":
            item = ReasoningItem(id=identity, content=[ReasoningText(text=text)], status=status)
            self._emit("reasoning_text.done", content_index=0, text=text)
        else:
            assert self._callee is not None, "a call is open"
            item = call_item(self._callee, self._identity, text, status)
            if isinstance(item, CallItem):
                self._emit("function_call_arguments.done", name=item.name, arguments=text)
            elif isinstance(item, CustomCallItem):
                # Only a whole call has its input as text: within arguments it is written as JSON.
                self._emit("custom_tool_call_input.delta", delta=item.input)
                self._emit("custom_tool_call_input.done", input=item.input)
        self.output[-1] = item
        self._events.append(self.event("output_item.done", output_index=len(self.output) - 1, item=item))
        self._kind, self._text, self._logprobs, self._callee = "", [], [], None

    def _emit(self, kind: str, **fields: Any) -> None:
        index = len(self.output) - 1
        self._events.append(self.event(kind, output_index=index, item_id=self.output[index].id, **fields))
