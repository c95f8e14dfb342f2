"""Answers of /v1/completions and /v1/chat/completions: what their formats have alike.

Owns: ids, what every chunk of a stream repeats, when usage is sent.  Does not know: what a choice looks like.
"""

from copy import copy
from typing import Any

import msgspec
from msgspec import UNSET

from engine.messages import Delta
from engine.text.tool_calls import ToolCallParser
from server.generate.endpoint import Writer
from server.generate.generation import Generation
from server.generate.output import OptionalUsage, PlainText, UsageBody, UsageCounter
from server.openai.requests import GenerationBody, StreamOptions


class StreamState:
    """The progress of a choice's stream.  num_chars: characters in the logprobs that were sent.

    parser: finds calls in its text, if they are looked for."""

    def __init__(self, index: int, parser: ToolCallParser | None = None) -> None:
        self.index = index
        self.parser = parser
        self.started = False
        self.num_chars = 0


class ChoicesWriter(Writer):
    """Writes an answer that is a list of choices, whole or in chunks.  head: what the answer and every chunk repeat."""

    id_prefix: str

    def __init__(
        self, body: GenerationBody, generation: Generation, usage: UsageCounter, model: str, fingerprint: str
    ) -> None:
        self.id = self.id_prefix + generation.origin.key.hex
        self.head: dict[str, Any] = {
            "id": self.id,
            "created": int(generation.origin.created),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.shows_token_ids = bool(body.return_token_ids)
        self.usage = usage
        self.generation = generation
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._continuous_usage = bool(options.continuous_usage_stats) and options.include_usage is not False
        self._states: dict[int, StreamState] = {}

    def chunks(self, state: StreamState, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        """Returns the chunks for new output of the choice that ``state`` is of."""
        raise NotImplementedError

    def usage_chunk(self, usage: UsageBody) -> msgspec.Struct:
        """Returns the stream's last chunk, where it was asked for."""
        raise NotImplementedError

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        if not (delta.text or delta.token_ids or delta.finish or delta.reasoning or delta.prompt_token_ids):
            return []
        if (state := self._states.get(index)) is None:
            parser = self.generation.new_parser and self.generation.new_parser()
            state = self._states[index] = StreamState(index, parser)
        return self.chunks(state, delta, self._chunk_usage(index))

    def plain(self, index: int) -> PlainText | None:
        if self.generation.new_parser is not None or self._continuous_usage or index not in self._states:
            return None
        state, usage = copy(self._states[index]), self._chunk_usage(index)
        return PlainText.like(lambda delta: self.chunks(state, delta, usage))

    def last_events(self) -> list[msgspec.Struct]:
        return [self.usage_chunk(self.usage.total())] if self._includes_usage else []

    def _chunk_usage(self, index: int) -> OptionalUsage:
        if self._continuous_usage:
            return self.usage.of_choice(index)
        return None if self._includes_usage else UNSET
