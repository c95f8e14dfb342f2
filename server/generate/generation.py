"""The request of one HTTP body to the engine, in the engine's terms.

Owns: what every generating endpoint makes of a body, how the choices of one prompt get their seeds, and what a request
takes along to another replica.
Does not know: JSON, request fields, responses.
"""

import hashlib
import secrets
import time
import uuid
import zlib
from collections.abc import Callable
from itertools import takewhile
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.messages import DEFAULT_OPTIONS, RequestOptions
from engine.text.tool_calls import ToolCallParser
from engine.types.params import MAX_SEED, SamplingParams
from engine.types.prompt import ChatTurn, Prompt, RequestPart

MAX_CHOICES = 256  # in one request
END_OF_TIME = 1 << 40  # seconds since 1970


class DeliveredChoice(msgspec.Struct, frozen=True):
    """A choice as far as the client has it.  tokens: int32[n].  num_events: of the stream.  ended: its end as well."""

    tokens: bytes
    num_events: Annotated[int, Meta(ge=0)] = 0
    ended: bool = False

    @property
    def resumed(self) -> bytes:
        """The output that it goes on from: of one that has ended the last token is made again, and its end with it."""
        return self.tokens[:-4] if self.ended else self.tokens


class ResumePoint(msgspec.Struct, frozen=True):
    """The facts that must be the same wherever a request runs, so that a router may let another replica go on with it.

    key: what its answer's names are made of.  created: seconds since 1970.  ``told``: choice -> what the client has of
    it.
    seed: of the choices without one; only a router gives it, and wants to know how far the client has got."""

    key: uuid.UUID = msgspec.field(default_factory=uuid.uuid4)
    created: Annotated[float, Meta(ge=0, le=END_OF_TIME)] = msgspec.field(default_factory=time.time)
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    told: dict[int, DeliveredChoice] = {}

    def name(self, number: int) -> str:
        """Returns 32 hex digits for the number-th part of the answer."""
        return hashlib.blake2b(b"%b %d" % (self.key.bytes, number), digest_size=16).hexdigest()


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One or more prompts, ``num_choices`` outputs for each; choice i * num_choices + k is prompt i's k-th.

    of_prompts: what each prompt asks by itself, where they differ; then ``params`` and ``options`` are the first one's.
    grammar_field: the request's field that says what the output must look like.
    new_parser: makes the parser of a choice's function calls; None where no call is looked for.
    names_tokens_by_id: log probabilities name tokens by their ids.  request_id: what the client calls the request.
    notes, session: as in ``Exchange``."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    of_prompts: tuple[tuple[SamplingParams, RequestOptions], ...] = ()
    grammar_field: str = ""
    num_choices: int = 1
    stream: bool = False
    new_parser: Callable[[], ToolCallParser] | None = None
    names_tokens_by_id: bool = False
    request_id: str = ""
    notes: tuple[str, ...] = ()
    session: str = ""
    origin: ResumePoint = msgspec.field(default_factory=ResumePoint)

    def with_parts(self, parts: dict[str, RequestPart]) -> "Generation":
        """Returns the generation with further parts for features of the engine."""
        options = msgspec.structs.replace(self.options, parts={**self.options.parts, **parts})
        return msgspec.structs.replace(self, options=options)


def opening_of(generation: Generation) -> tuple[int, int]:
    """Returns checksums of the first conversation's system prompt and tools, by which later ones are compared."""
    turns = generation.prompts[0]
    if not (isinstance(turns, tuple) and turns and isinstance(turns[0], ChatTurn)):
        return 0, 0
    system = "".join(turn.content for turn in takewhile(lambda turn: turn.role == "system", turns))
    tools = generation.options.chat.tools
    return zlib.crc32(system.encode("utf-8", "surrogatepass")), zlib.crc32(tools.encode("utf-8", "surrogatepass"))


def new_seed() -> int:
    """Returns one for a request without that may go on in another process, which would draw its own."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_seed(seed: int | None, k: int) -> int | None:
    """Seed of a prompt's k-th choice.  The first keeps the request's own, so that n=1 and n=8 begin alike."""
    if seed is None or k == 0:
        return seed
    # One round of splitmix64 (Steele et al. 2014): neighbouring inputs give unrelated seeds.
    mask = (1 << 64) - 1
    x = (seed + k * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) & MAX_SEED
