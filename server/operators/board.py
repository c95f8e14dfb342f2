"""The departures board as JSON: each request that has not ended, what every page holds, the last minutes.

Owns: the shape of that JSON, and what of a request each viewer may see.  Does not know: how a board is drawn, HTML.
A viewer sees the first words of the requests that it may also end: its own key's, or those of every client with an
operator's
key or where there are no keys.  Of the others it sees where they are, and neither words, id nor client.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.scheduling.board import Board, State
from engine.scheduling.meter import SPAN_S, Span
from engine.types.prompt import ChatTurn, Prompt
from server.clients import ClientRequest

MAX_WORDS_CHARS = 80
MAX_LINE_CHARS = 400
MAX_WORDS_TOKENS = 32
Decode = Callable[[Sequence[int]], str]


class RowBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request.  number: the engine's for it.  id: what /abort_request calls it; None if the viewer may not end it.

    prefilled_tokens: of the prompt, cached ones among them.
    chunks: that the prompt takes at most.  decoding_s: since its first token.  age_s: since the engine has it."""

    number: int
    id: str | None
    client: str | None
    words: str | None
    state: State
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    chunks: int
    output_tokens: int
    waited_s: float
    decoding_s: float | None
    age_s: float


class PoolBody(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as cells of ``cell_pages`` pages.

    runs: [how many cells, what they show, index in ``prefixes`` or -1]; 0 is free, 1 cached, 2 used by requests that
    are not on the board or by none any more, 3 by several of them, 4 + n by the request at n on the board.
    evicted: [number of the eviction, cell], the latest last; evictions: how many pages were evicted."""

    pages: int
    cell_pages: int
    runs: tuple[tuple[int, int, int], ...]
    evictions: int
    evicted: tuple[tuple[int, int], ...]


class SpanBody(msgspec.Struct, frozen=True, kw_only=True):
    """Some seconds of the past: they ended ``age_s`` ago.  busy: share of them in which the device had a step."""

    age_s: float
    output_tokens: int
    prefill_tokens: int
    steps: int
    most_rows: int
    busy: float


def rows(board: Board, mine: Iterable[ClientRequest], decode: Decode) -> list[RowBody]:
    """Returns the requests of the board.  mine: those that the viewer may see and end."""
    seen = {
        stream.request_id: (one, prompt)
        for one in mine
        for stream, prompt in zip(one.streams, one.prompts, strict=True)
    }
    made = []
    for row in board.rows:
        one, prompt = seen.pop(row.request_id, (None, ""))
        made.append(
            RowBody(
                number=row.request_id,
                id=one.exchange.id if one else None,
                client=one.exchange.client if one else None,
                words=first_words(prompt, decode) if one else None,
                state=row.state,
                prompt_tokens=row.num_prompt,
                cached_tokens=row.num_cached,
                prefilled_tokens=row.num_prefilled,
                chunks=row.num_chunks,
                output_tokens=row.num_output,
                waited_s=round(row.waited_s, 3),
                decoding_s=None if row.decoding_s is None else round(row.decoding_s, 3),
                age_s=round(row.age_s, 3),
            )
        )
    return made


def first_words(prompt: Prompt, decode: Decode) -> str:
    """Returns the first words of what distinguishes requests: a text's last line, the last question of a
    conversation."""
    if isinstance(prompt, str):
        text = prompt[-MAX_LINE_CHARS:].rstrip().rpartition("\n")[2]
    elif prompt and isinstance(prompt[-1], ChatTurn):
        asked = [turn for turn in prompt if isinstance(turn, ChatTurn) and turn.role == "user"]
        text = (asked or [prompt[-1]])[-1].content[:MAX_LINE_CHARS]
    else:
        text = decode([token for token in prompt[:MAX_WORDS_TOKENS] if isinstance(token, int)])
    return " ".join(text.split())[:MAX_WORDS_CHARS]


def pool(board: Board) -> PoolBody:
    """Returns the pool."""
    shown = board.pool
    return PoolBody(
        pages=shown.num_pages,
        cell_pages=shown.cell_pages,
        runs=shown.runs,
        evictions=shown.num_evicted,
        evicted=shown.evicted,
    )


def history(spans: Iterable[Span], now: float) -> list[SpanBody]:
    """Returns the past, oldest first; seconds in which nothing ran are left out."""
    return [
        SpanBody(
            age_s=round(now - (span.number + 1) * SPAN_S, 3),
            output_tokens=span.num_output_tokens,
            prefill_tokens=span.num_prefill_tokens,
            steps=span.num_steps,
            most_rows=span.most_rows,
            busy=round(min(1.0, span.busy_s / SPAN_S), 4),
        )
        for span in spans
    ]
