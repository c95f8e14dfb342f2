"""The messages of one request's way through the engine, in the order in which it meets them.

    ingress ─Tokenize→ tokenizer ─Admit→ scheduler ─Step→ executors
    ingress ←─Deltas── tokenizer ←Tokens─ scheduler ←StepDone─ executors

Messages about the engine's own state are in ``engine/types/notices.py``; those between worker processes and their
engine are in ``engine/workers/messages.py``.  ``engine/actors/inboxes.py`` lists what each actor handles.
Messages are immutable plain data.  Integer columns travel as packed little-endian bytes
(int32 unless said otherwise), so a message costs per step and not per token.
``engine/workers/wire.py`` encodes them with msgpack; nothing is ever pickled.
"""

from enum import IntEnum
from typing import Final

from msgspec import field

from engine.types.errors import RequestError
from engine.types.logprobs import Logprobs, PromptLogprobs, TokenLogprobs
from engine.types.notices import Message
from engine.types.params import SamplingParams
from engine.types.prompt import UNKNOWN_ORIGIN, ChatOptions, ChatTurn, Origin, RequestPart


class Finish(IntEnum):
    """The reason for which a sequence ended; 0 while it runs."""

    RUNNING = 0
    STOP = 1  # an EOS or stop token, or a stop string
    LENGTH = 2  # max_tokens or the context is used up
    ABORT = 3  # cancelled by the client or by a deadline
    ERROR = 4  # a Failed message says why


# ---- ingress -> tokenizer -------------------------------------------------------------------


class RequestOptions(Message, frozen=True, kw_only=True):
    """The options of a request besides its prompt and its sampling parameters.

    echo: repeat the prompt's text in front of the output.
    chat: how to read a conversation.
    prompt_only: only the prompt is wanted, so the token that its last step samples is dropped.
    return_prompt_ids: the first delta has the prompt's token ids.
    truncate_to: cut the end of a longer prompt, or of the document of a query and a document; 0 for no limit.
    keep_last: cut a text prompt to its last tokens; 0 for all.
    resumed: int32[n], output that the client has already from another engine; the answer continues it.
    parts: what features read, by their names."""

    echo: bool = False
    priority: int = 0
    cache_salt: str = ""
    chat: ChatOptions = ChatOptions()
    prompt_only: bool = False
    return_prompt_ids: bool = False
    truncate_to: int = 0
    keep_last: int = 0
    resumed: bytes = b""
    origin: Origin = UNKNOWN_ORIGIN
    parts: dict[str, RequestPart] = field(default_factory=dict)


DEFAULT_OPTIONS: Final = RequestOptions()
RULED_OUT: Final = -2  # instead of a token, in ``StepDone``


class Tokenize(Message, frozen=True, kw_only=True):
    """A new request.  Exactly one of text, token_ids (int32[n]), turns is given.

    Its length is not checked against max_model_len yet: the tokenizer counts, the scheduler decides."""

    request_id: int
    params: SamplingParams
    text: str | None = None
    token_ids: bytes | None = None
    turns: tuple[ChatTurn, ...] | None = None
    options: RequestOptions = DEFAULT_OPTIONS


class Abort(Message, frozen=True, kw_only=True):
    """Cancel a request, whatever state it is in; idempotent, unknown ids are ignored.  It takes the request's own road,
    and so never overtakes it.  finish: STOP where a stop string has ended it."""

    request_id: int
    finish: Finish = Finish.ABORT


# ---- tokenizer -> scheduler -----------------------------------------------------------------


class Admit(Message, frozen=True, kw_only=True):
    """A tokenised request.  token_ids: int32[n], n >= 1.  num_resumed: how many of them, at the end, are output.
    parts: see ``RequestOptions``.  check_s: seconds in which the form of its output was checked."""

    request_id: int
    token_ids: bytes
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    num_resumed: int = 0
    origin: Origin = UNKNOWN_ORIGIN
    parts: dict[str, RequestPart] = field(default_factory=dict)
    check_s: float = 0.0


# ---- scheduler -> executors -----------------------------------------------------------------


class Admission(Message, frozen=True, kw_only=True):
    """A sequence takes a row.

    token_ids: int32[n], all tokens known so far (prompt, then output kept over a retraction).
    num_prompt_tokens: how many of them are the prompt.
    num_computed_tokens: how many already have their K/V in ``pages``: int32[k], the page table's entries 0..k-1."""

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    pages: bytes
    params: SamplingParams


class FeatureRequest(Message, frozen=True, kw_only=True):
    """Work for a feature's half on every rank, next to the steps.

    number: its answers have the same.  body: as the feature encodes it."""

    feature: str
    number: int
    body: bytes


class Step(Message, frozen=True, kw_only=True):
    """One forward pass, as changes to the state that the executor holds.

    Applied in order: the parts of features, admissions, writes to page tables, then the batch: every decode row (one
    token each, its last sampled one), then every prefill segment.  Sampled: all decode rows, then the last
    ``prefill_samples`` positions of each segment: 0, 1 if it ends at the last known token, more if a part wants so."""

    step_id: int
    admissions: tuple[Admission, ...] = ()
    table_rows: bytes = b""  # int32[P]
    table_indexes: bytes = b""  # int32[P]  position in the row's page table
    table_pages: bytes = b""  # int32[P]
    decode_rows: bytes = b""  # int32[D]
    prefill_rows: bytes = b""  # int32[S]
    prefill_starts: bytes = b""  # int32[S]  first position of the segment
    prefill_lengths: bytes = b""  # int32[S]
    prefill_samples: bytes = b""  # int32[S]
    filled_pages: bytes = b""  # int32[F]  pages that parts fill with content that was computed before
    num_copied: int = 0  # pages that parts copy
    parts: dict[str, bytes] = field(default_factory=dict)  # of features, by name, as each encodes its own


# ---- executors -> scheduler -----------------------------------------------------------------


class FeatureAnswer(Message, frozen=True, kw_only=True):
    """One rank's answer to a ``FeatureRequest``."""

    rank: int
    feature: str
    number: int
    body: bytes


class StepExtras(Message, frozen=True, kw_only=True):
    """The results of a step for one row besides its token.

    logprobs: of the token.
    prompt_logprobs: of the part of the prompt that the step computes; all parts come before the first token or with
    it, and a part may come again.
    result: what a feature adds to the request's output, as it encodes it.
    failure: why the row has no token.
    later_logprobs: of the row's other tokens.
    num_accepted, num_rejected: tokens that were guessed before the token, right and wrong ones."""

    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    result: bytes = b""
    failure: str = ""
    later_logprobs: tuple[Logprobs, ...] = ()
    num_accepted: int = 0
    num_rejected: int = 0


class StepDone(Message, frozen=True, kw_only=True):
    """A step has finished.

    token_ids: int32[N] as ``Step`` orders them; -1: the logits are not finite, ``RULED_OUT``: processors left no token.
    extras: row -> what it has beside a token; of prefills that sample nothing too.  note: why it took longer.
    parts: of features, by name, as each encodes its own."""

    rank: int
    step_id: int
    token_ids: bytes
    extras: dict[int, StepExtras] = field(default_factory=dict)
    note: str = ""
    parts: dict[str, bytes] = field(default_factory=dict)


# ---- scheduler -> tokenizer -----------------------------------------------------------------


class Tokens(Message, frozen=True, kw_only=True):
    """The tokens that one step produced, one line per token.

    request_ids: int64[N].  token_ids: int32[N], -1 for "no token, only an end".  finishes: uint8[N], Finish.
    cached_tokens: request id -> prompt tokens found in the cache, and put there, with a request's first token.
    extras: request id -> what it has beside a token; it may have no line."""

    request_ids: bytes
    token_ids: bytes
    finishes: bytes
    cached_tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    extras: dict[int, StepExtras] = field(default_factory=dict)


class Failed(Message, frozen=True, kw_only=True):
    """One request ends with an error (scheduler -> tokenizer -> ingress).  Fields as in RequestError."""

    request_id: int
    message: str
    status: int = 400
    code: str = "invalid_value"
    param: str | None = None

    @classmethod
    def of(cls, request_id: int, error: RequestError) -> "Failed":
        """Return the message for an error."""
        return cls(
            request_id=request_id, message=error.message, status=error.status, code=error.code, param=error.param
        )


# ---- tokenizer -> ingress -------------------------------------------------------------------


class Usage(Message, frozen=True, kw_only=True):
    """Token counts of a request, final in its last delta.  cached_tokens, created_tokens: as in ``Tokens``.

    reasoning_tokens: of thoughts, if separated.  accepted_tokens, rejected_tokens: right and wrong guesses."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    created_tokens: int = 0


class Delta(Message, frozen=True, kw_only=True):
    """New output of one request.

    usage: in the last delta, with the finish; a preliminary one in the first delta with a token.
    text: text that may be shown now.  token_ids: int32[n] of the tokens since the last delta.
    stop_reason: the stop string or stop token id that ended it, where that is the cause.
    reasoning: thoughts, if they are separated; they come before all other text.
    prompt_logprobs: of every prompt token, in the first delta; the first token's number means nothing.
    result: as in ``StepExtras``, one after the other.  prompt_token_ids: int32[n], in the first delta, if requested.
    resumed: this is ``RequestOptions.resumed`` again, with its text; it comes first, its log probabilities are 0."""

    request_id: int
    text: str = ""
    token_ids: bytes = b""
    finish: Finish = Finish.RUNNING
    stop_reason: str | int | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    result: bytes = b""
    prompt_token_ids: bytes = b""
    resumed: bool = False


class Deltas(Message, frozen=True, kw_only=True):
    """All deltas of one step."""

    deltas: tuple[Delta, ...]


# ---- supervision ----------------------------------------------------------------------------


class Stop(Message, frozen=True, kw_only=True):
    """End after the messages before this one; from the system to each actor, in the order of the flow."""
