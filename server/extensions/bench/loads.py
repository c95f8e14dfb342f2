"""The load of a benchmark: conversations of one or more turns, and when each begins.

Owns: how loads are drawn, trace files.  Does not know: HTTP, what is measured.
A prompt is made of common English words, which most tokenizers have as a token each; how many tokens it really has is
what the server says.  The same seed is the same load.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from engine.types.errors import ConfigError

TEXT = (
    "the of and to in is was he for it with as his on be at by had not are but from or have an they which one you were "
    "all her she there would their we him been has when who will no more if out so up said what its about than into"
)
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """The words of a user, and the most tokens of the answer."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each of which is sent with all before it and their answers.  due_s: after the run's begin; 0 if as soon
    as there is room."""

    turns: tuple[LoadTurn, ...]
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """The lengths of a random load, in words.

    variation: lengths are between (1 - it) and (1 + it) times what is given.

    prefix: words that all of a group's conversations begin with; groups: how many different ones there are."""

    prompt: int = 128
    output: int = 128
    variation: float = 0.0
    prefix: int = 0
    groups: int = 1
    turns: int = 1


def draw(count: int, sizes: LoadSizes, rng: np.random.Generator) -> list[Conversation]:
    """So many random conversations, all due at once."""
    prefixes = [_words(sizes.prefix, rng) for _ in range(sizes.groups)]
    conversations = []
    for _ in range(count):
        prefix = prefixes[int(rng.integers(sizes.groups))]
        turns = []
        for number in range(sizes.turns):
            words = [*(prefix if number == 0 else ()), *_words(_vary(sizes.prompt, sizes, rng), rng)]
            turns.append(LoadTurn(" ".join(words), _vary(sizes.output, sizes, rng)))
        conversations.append(Conversation(tuple(turns)))
    return conversations


def _words(count: int, rng: np.random.Generator) -> list[str]:
    return [WORDS[index] for index in rng.integers(len(WORDS), size=count)]


def _vary(length: int, sizes: LoadSizes, rng: np.random.Generator) -> int:
    return max(1, round(length * float(rng.uniform(1 - sizes.variation, 1 + sizes.variation))))


def arrivals(count: int, per_s: float, burst: int, rng: np.random.Generator) -> list[float]:
    """Times at which a Poisson process at ``per_s`` lets conversations begin, ``burst`` of them together."""
    gaps = rng.exponential(burst / per_s, -(-count // burst))
    return [float(at) for at in np.repeat(np.cumsum(gaps), burst)[:count]]


def due(conversations: list[Conversation], times: list[float]) -> list[Conversation]:
    """The same at these times."""
    return [Conversation(one.turns, at) for one, at in zip(conversations, times, strict=True)]


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a trace file.  time: seconds, from any beginning.  prompt, or prompt_tokens for random words."""

    time: Annotated[float, Meta(ge=0)]
    max_tokens: Annotated[int, Meta(ge=1)]
    prompt: str | None = None
    prompt_tokens: Annotated[int, Meta(ge=1)] | None = None


def read_trace(path: Path, rng: np.random.Generator) -> list[Conversation]:
    """A JSON object per line, see ``TraceLine``, from the first one's time on.  Raises ConfigError."""
    try:
        lines = [*_trace_lines(path)]
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"the trace {path} has no requests; it needs a JSON object on each line")
    begin = min(line.time for line in lines)
    found = [Conversation((LoadTurn(_prompt_of(line, rng), line.max_tokens),), line.time - begin) for line in lines]
    return sorted(found, key=lambda one: one.due_s)


def _prompt_of(line: TraceLine, rng: np.random.Generator) -> str:
    return line.prompt if line.prompt is not None else " ".join(_words(line.prompt_tokens or 1, rng))


def _trace_lines(path: Path) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(TraceLine)
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; a line has time, max_tokens, prompt or prompt_tokens"
            ) from None
        if (line.prompt is None) == (line.prompt_tokens is None):
            raise ConfigError(f"{path}, line {number}: give prompt or prompt_tokens, one of them")
        yield line
