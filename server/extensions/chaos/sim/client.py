"""A simulated client: opens a request, reads its stream in its own manner, remembers everything that it gets.

Owns: what one client saw.  Does not know: what it should have seen.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.actors.ingress import Ingress
from engine.actors.stream import Stream
from engine.features.lora.files import Adapter
from engine.messages import Delta, Finish, RequestOptions, Usage
from engine.types.errors import CallboardError, RequestError
from engine.types.logprobs import TokenLogprobs
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Origin
from server.extensions.chaos.ledger import Note, no_note
from server.extensions.chaos.sim.codec import text_of, tokens_of
from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import ADAPTERS
from server.extensions.chaos.sim.probe import wrap
from server.extensions.chaos.sim.scenario import Submit


class SimClient:
    """A client.  number: of its operation; also its seed, by which the device knows it."""

    def __init__(self, number: int, op: Submit, note: Note = no_note) -> None:
        self.number = number
        self._note = note
        self.op = op
        self.opened_at = 0.0
        self.ended_at = math.inf  # when the terminal event came, or the client went; read or not
        self.stream: Stream | None = None
        self.refusal: RequestError | None = None
        self.cancelled = False
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish = Finish.RUNNING
        self.stop_reason: str | int | None = None
        self.first_usage: Usage | None = None
        self.usage: Usage | None = None
        self.error: CallboardError | None = None
        self.num_terminals = 0
        self.reading: asyncio.Task[None] | None = None

    def open(self, ingress: Ingress, longest: int = 0) -> None:
        """Ask; a refusal is remembered.  longest: tokens of prompt and output that fit."""
        self._longest = longest
        op = self.op
        loop = asyncio.get_running_loop()
        self.opened_at = loop.time()
        prompt: str | tuple[int, ...] | tuple[ChatTurn, ...] = op.prompt
        if op.kind == "text":
            prompt = text_of(op.prompt)
        elif op.kind == "turns":
            half = len(op.prompt) // 2
            prompt = (ChatTurn("user", text_of(op.prompt[:half])), ChatTurn("user", text_of(op.prompt[half:])))
        params = SamplingParams(
            max_tokens=op.max_tokens,
            seed=self.number + 1,
            ignore_eos=op.ignore_eos,
            stop=op.stop,
            stop_token_ids=op.stop_token_ids,
            include_stop_str_in_output=op.include_stop,
            logprobs=1 if op.logprobs else None,
        )
        try:
            self.stream = ingress.open(
                prompt,
                params,
                RequestOptions(
                    echo=op.echo,
                    priority=op.priority,
                    cache_salt=op.salt,
                    origin=Origin(tenant=op.tenant),
                    parts=Adapter(op.adapter, "/nowhere").parts if op.adapter else {},
                ),
            )
        except RequestError as error:
            self.refusal = error
            self._note("refused", request=self.number, code=error.code)
            return
        self._note_asked()
        for event in ("push", "fail"):
            wrap(self.stream, event, self._watch_event)
        if op.reader != "never":
            self.reading = loop.create_task(self.read(), name=f"client-{self.number}")

    @property
    def is_open(self) -> bool:
        """Accepted, and without its terminal event."""
        return self.stream is not None and not self.stream.ended

    def cancel(self) -> None:
        """Go away."""
        if self.stream is None or self.cancelled:
            return
        self.cancelled = not self.num_terminals  # what it had not read by then, it will not read
        if self.reading is not None:
            self.reading.cancel()
        self._note("left", request=self.number)
        self.stream.close()
        self._note_end()

    def _note_asked(self) -> None:
        op = self.op
        self._note(
            "asked",
            request=self.number,
            prompt=list(op.prompt),
            most=op.max_tokens if op.max_tokens is not None else max(0, self._longest - len(op.prompt)),
            least=op.max_tokens or 0,
            stop_ids=list(op.stop_token_ids),
            stops=[tokens_of(stop) for stop in op.stop],
            include_stop=op.include_stop,
            ignore_eos=op.ignore_eos,
            adapter=ADAPTERS.index(op.adapter),
        )

    def _watch_event(self, happen: Callable[[Any], None], event: Any) -> None:
        self._note_event(event)
        happen(event)
        if not self.is_open:
            self._note_end()

    def _note_event(self, event: Any) -> None:
        """Keep what the engine hands to the stream, read or not."""
        if not isinstance(event, Delta):
            self._note("end", request=self.number, why=getattr(event, "code", "engine_died"))
            return
        if event.token_ids:
            tokens = np.frombuffer(event.token_ids, dtype=np.int32).tolist()
            self._note("tokens", request=self.number, tokens=tokens)
        if event.finish != Finish.RUNNING:
            self._note("end", request=self.number, why=event.finish.name.lower())

    def _note_end(self) -> None:
        self.ended_at = min(self.ended_at, asyncio.get_running_loop().time())

    async def read(self) -> None:
        """Read to the end."""
        assert self.stream is not None
        try:
            if self.op.reader == "collect":
                self._take(await self.stream.collect())
            while True:
                self._take(await self.stream.next())
                if self.op.reader == "slow":
                    await asyncio.sleep(0.2 * luck(self.number, len(self.tokens)))
        except StopAsyncIteration:
            pass
        except CallboardError as error:
            self.error = error
            self.num_terminals += 1

    def _take(self, delta: Delta) -> None:
        tokens = np.frombuffer(delta.token_ids, dtype=np.int32).tolist()
        if delta.usage is not None:
            if not self.tokens:
                self.first_usage = delta.usage
            self.usage = delta.usage
        self.tokens += tokens
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs
        if delta.finish != Finish.RUNNING:
            self.finish = delta.finish
            self.stop_reason = delta.stop_reason
            self.num_terminals += 1
