"""Answers of /api/chat and /api/generate: an object, or lines that add up to it.

Owns: what a line holds, how an answer ends, durations.  Does not know: sockets, JSON, the engine.
A call is sent once its arguments are whole, since they are an object here.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish
from engine.text.tool_calls import CallPiece, text_and_calls
from engine.types.errors import RequestError
from engine.types.logprobs import TokenLogprobs
from server.extensions.ollama.objects import (
    ChatLine,
    DoneReason,
    GenerateLine,
    OllamaCall,
    OllamaError,
    OllamaFunction,
    OllamaLogprob,
    OllamaMessage,
    OllamaToken,
    ollama_error,
)
from server.generate.endpoint import Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter, finite
from server.openai.chat import call_id

DONE_REASONS: dict[Finish, DoneReason] = {Finish.LENGTH: "length"}  # all others are "stop"


class _Lines(Writer):
    """The common part of both writers."""

    def __init__(self, model: str, generation: Generation, usage: UsageCounter) -> None:
        """Make a writer.  model: the name that the client gave."""
        self.id = f"ollama-{generation.origin.key.hex}"
        self._model = model
        self._origin = generation.origin
        self._only_loads = generation.options.prompt_only
        self._parser = generation.new_parser and generation.new_parser()
        self._usage = usage
        self._began = time.monotonic()
        self._first: float | None = None
        self._finish = Finish.RUNNING
        self._names: list[str] = []
        self._arguments: list[str] = []

    def whole(self, outputs: Sequence[Output]) -> msgspec.Struct:
        (output,) = outputs
        text = self._take(output.delta)
        return self._line(text, output.delta.reasoning, output.delta.logprobs, **self._end())

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        text = self._take(delta)
        if not (text or delta.reasoning or delta.logprobs):
            return []
        return [self._line(text, delta.reasoning, delta.logprobs, calls=False)]

    def last_events(self) -> list[msgspec.Struct]:
        return [self._line("", "", (), **self._end())]

    def failure(self, error: RequestError) -> OllamaError:
        return ollama_error(error)

    def _line(
        self, text: str, thoughts: str, logprobs: Sequence[TokenLogprobs], *, calls: bool = True, **end: Any
    ) -> msgspec.Struct:
        """Returns a line.  calls: whether all calls of the answer are in it."""
        raise NotImplementedError

    def _take(self, delta: Delta) -> str:
        """Take new output.  Returns its text, without calls."""
        if self._first is None and delta.token_ids:
            self._first = time.monotonic()
        self._finish = delta.finish
        if self._parser is None:
            return delta.text
        parts = self._parser.push(delta.text)
        if delta.finish != Finish.RUNNING:
            parts += self._parser.finish()
        text, pieces = text_and_calls(parts)
        for piece in pieces:
            self._add(piece)
        return text

    def _add(self, piece: CallPiece) -> None:
        if piece.name is not None:
            self._names.append(piece.name)
            self._arguments.append("")
        self._arguments[piece.index] += piece.arguments

    def _calls(self) -> list[OllamaCall] | UnsetType:
        """Returns the calls whose arguments are an object; one that was cut off has none."""
        calls = []
        for index, (name, arguments) in enumerate(zip(self._names, self._arguments, strict=True)):
            try:
                read = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError):
                continue
            calls.append(OllamaCall(call_id(self._origin, 0, index), OllamaFunction(index, name, read)))
        return calls or UNSET

    def _head(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {
            "model": self._model,
            "created_at": now,
            "logprobs": [_logprob(one) for one in logprobs] or UNSET,
        }

    def _end(self) -> dict[str, Any]:
        """Returns the fields of the last line."""
        if self._only_loads:
            return {"done": True, "done_reason": "load"}
        now, counts = time.monotonic(), self._usage.total()
        first = now if self._first is None else self._first
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(self._finish, "stop"),
            "total_duration": _nanoseconds(now - self._began),
            "load_duration": 0,
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._began),
            "eval_count": counts.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
            "weight_versions": self._usage.weight_versions,
        }


class ChatLines(_Lines):
    """Writes the answer of /api/chat."""

    def _line(
        self, text: str, thoughts: str, logprobs: Sequence[TokenLogprobs], *, calls: bool = True, **end: Any
    ) -> ChatLine:
        message = OllamaMessage(content=text, thinking=thoughts or UNSET, tool_calls=self._calls() if calls else UNSET)
        return ChatLine(**self._head(logprobs), message=message, **end)


class GenerateLines(_Lines):
    """Writes the answer of /api/generate."""

    def _line(
        self, text: str, thoughts: str, logprobs: Sequence[TokenLogprobs], *, calls: bool = True, **end: Any
    ) -> GenerateLine:
        return GenerateLine(**self._head(logprobs), response=text, thinking=thoughts or UNSET, **end)


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _logprob(entry: TokenLogprobs) -> OllamaLogprob:
    sampled, top = entry.sampled, entry.top
    rivals = [OllamaToken(one.text, finite(one.logprob), list(one.utf8)) for one in top]
    return OllamaLogprob(sampled.text, finite(sampled.logprob), list(sampled.utf8), rivals)
