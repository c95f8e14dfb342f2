"""Log probabilities of tokens, as executors return them and as clients get them.

Owns: the fields.  Does not know: how they are computed, formats of answers.
"""

from engine.types.notices import Message


class Logprobs(Message, frozen=True, kw_only=True):
    """Log probabilities of one sampled token, and of the k most likely or of those that the request names.

    top_ids: int32[k], top_logprobs: float32[k], most likely first, or as they are named."""

    logprob: float
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log probabilities of prompt tokens in a row, from position ``first`` on."""

    first: int
    entries: tuple[Logprobs, ...]


class TokenText(Message, frozen=True, kw_only=True):
    """A token for log probabilities: its own bytes may be part of a character."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float


class TokenLogprobs(Message, frozen=True, kw_only=True):
    """The sampled token and the most likely ones at its position."""

    sampled: TokenText
    top: tuple[TokenText, ...]
