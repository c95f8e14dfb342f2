"""An output as the blocks of a message, and as the events of their making.

Owns: the order of blocks and events, how an answer has ended.  Does not know: sockets, JSON, the engine.
The answer in one piece is what the events add up to: both are made here.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from engine.messages import Delta, Finish
from engine.text.tool_calls import CallPiece, OutputPart
from engine.types.errors import RequestError
from server.extensions.anthropic.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageDelta,
    MessageEnd,
    MessageError,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    message_error,
)
from server.generate.endpoint import Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter

STOP_REASONS: dict[Finish, StopReason] = {
    Finish.STOP: "end_turn",
    Finish.LENGTH: "max_tokens",
    Finish.ABORT: "pause_turn",  # the rest comes if the answer is sent back as it is
}


class MessagesWriter(Writer):
    """Writes a message, or the events of its making."""

    def __init__(self, generation: Generation, usage: UsageCounter, model: str) -> None:
        self.id = f"msg_{generation.origin.key.hex}"
        self._origin = generation.origin
        self._usage = usage
        self._model = model
        self._parser = generation.new_parser and generation.new_parser()
        self._blocks: list[Block] = []  # the last one is empty while it grows
        self._written: list[str] | None = None  # what has come of the last one; None if it has ended
        self._events: list[MessageEvent] = []
        self._end = MessageEnd(None, None)
        self._started = False

    def whole(self, outputs: Sequence[Output]) -> MessageObject:
        (output,) = outputs
        self._take(output.delta)
        return self._message()

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        if not self._started:
            self._started = True
            self._events.append(MessageStart(message=self._message()))
        self._take(delta)
        events, self._events = self._events, []
        return [*events]

    def last_events(self) -> list[msgspec.Struct]:
        end = msgspec.structs.replace(self._end, weight_versions=self._usage.weight_versions)
        return [MessageDelta(delta=end, usage=self._counts()), MessageStop()]

    def failure(self, error: RequestError) -> MessageError:
        return message_error(error)

    def _message(self) -> MessageObject:
        return MessageObject(
            id=self.id,
            model=self._model,
            content=self._blocks.copy(),
            stop_reason=self._end.stop_reason,
            stop_sequence=self._end.stop_sequence,
            usage=self._counts(),
            weight_versions=self._usage.weight_versions if self._end.stop_reason else UNSET,
        )

    def _counts(self) -> MessageUsage:
        counts = self._usage.total()
        cached, created = counts.prompt_tokens_details.cached_tokens, sum(self._usage.created_tokens)
        return MessageUsage(
            input_tokens=counts.prompt_tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=counts.completion_tokens,
        )

    def _take(self, delta: Delta) -> None:
        """Add new output."""
        ended = delta.finish != Finish.RUNNING
        if delta.reasoning:
            self._write(ThinkingBlock(thinking=""), delta.reasoning)
        parts: list[OutputPart] = [delta.text]
        if self._parser is not None:
            parts = self._parser.push(delta.text) + (self._parser.finish() if ended else [])
        for part in parts:
            if isinstance(part, CallPiece):
                self._write_call(part)
            elif part:
                self._write(TextBlock(text=""), part)
        if ended:
            self._close()
            self._end = self._ending(delta)

    def _ending(self, delta: Delta) -> MessageEnd:
        if isinstance(delta.stop_reason, str):
            return MessageEnd("stop_sequence", delta.stop_reason)
        if delta.finish == Finish.STOP and self._parser is not None and self._parser.num_calls:
            return MessageEnd("tool_use", None)
        return MessageEnd(STOP_REASONS[delta.finish], None)

    def _write_call(self, piece: CallPiece) -> None:
        if piece.name is not None:
            name = self._origin.name(len(self._blocks))
            self._open(ToolUseBlock(id=f"toolu_{name[:24]}", name=piece.name))
        if piece.arguments:
            self._grow(piece.arguments)

    def _write(self, empty: Block, text: str) -> None:
        if self._written is None or type(self._blocks[-1]) is not type(empty):
            self._open(empty)
        self._grow(text)

    def _open(self, empty: Block) -> None:
        self._close()
        self._events.append(BlockStart(index=len(self._blocks), content_block=empty))
        self._blocks.append(empty)
        self._written = []

    def _grow(self, text: str) -> None:
        assert self._written is not None, "a block is open"
        self._written.append(text)
        delta: TextDelta | ThinkingDelta | InputDelta
        match self._blocks[-1]:
            case TextBlock():
                delta = TextDelta(text=text)
            case ThinkingBlock():
                delta = ThinkingDelta(thinking=text)
            case ToolUseBlock():
                delta = InputDelta(partial_json=text)
        self._events.append(BlockDelta(index=len(self._blocks) - 1, delta=delta))

    def _close(self) -> None:
        """End the open block, if there is one."""
        if self._written is None:
            return
        text, self._written = "".join(self._written), None
        match self._blocks[-1]:
            case TextBlock():
                self._blocks[-1] = TextBlock(text=text)
            case ThinkingBlock():
                self._blocks[-1] = ThinkingBlock(thinking=text)
            case ToolUseBlock() as call:
                self._blocks[-1] = msgspec.structs.replace(call, input=_read_input(text))
        self._events.append(BlockStop(index=len(self._blocks) - 1))


def _read_input(arguments: str) -> dict[str, object]:
    """Returns a call's arguments; none of a call that was cut off, or that the model wrote wrong."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return {}
