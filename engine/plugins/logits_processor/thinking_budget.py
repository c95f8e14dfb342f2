"""Ends a model's thoughts after a number of tokens: the next token can then only be the one that closes them.

Legend: n rows · L tokens · V vocabulary

The thoughts may be opened by the prompt or by the output; a prompt that closes them at its end leaves none.
"""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from engine.plugins.hookspecs import LogitsProcessorContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.processors import LogitsRows

if TYPE_CHECKING:
    from torch import Tensor

CALLBOARD_PLUGIN = {"api": 1}

NEAR = 4  # tokens from the end of the prompt, either way: white space may be between
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class ThinkingBudget:
    """Counts the output's tokens in rows that are in their thoughts."""

    def __init__(self, vocab_size: int) -> None:
        # Of a request.  tokens: of its thoughts, at most.  opens, closes: the tokens around thoughts.
        token_id: Any = Annotated[int, Meta(ge=0, lt=vocab_size)]
        fields: list[tuple[str, Any]] = [("tokens", Count), ("opens", token_id), ("closes", token_id)]
        self.params = msgspec.defstruct("ThinkingBudgetParams", fields, bases=(Options,), frozen=True)

    def process(self, logits_nV: "Tensor", rows: LogitsRows) -> "Tensor":
        """Process all rows at once."""
        given = np.array([(one.tokens, one.opens, one.closes) for one in rows.params], dtype=np.int64)
        tokens_n, opens_n, closes_n = rows.upload(given.ravel()).view(-1, 3).unbind(1)
        place_nL = _numbers(rows.lengths_n, rows.token_ids_nL.shape[1]) - rows.num_prompt_n[:, None]
        is_near_nL = (place_nL >= -NEAR) & (place_nL < (rows.lengths_n - rows.num_prompt_n)[:, None])
        opened_nL = (rows.token_ids_nL == opens_n[:, None]) & is_near_nL & (place_nL < NEAR)
        closed_nL = (rows.token_ids_nL == closes_n[:, None]) & is_near_nL
        is_spent_n = opened_nL.any(1) & ~closed_nL.any(1) & (rows.lengths_n - rows.num_prompt_n >= tokens_n)
        # By comparison, not by index: a token that is not there then rules out its own row alone.
        is_close_nV = _numbers(closes_n, logits_nV.shape[1]) == closes_n[:, None]
        return logits_nV.masked_fill(is_spent_n[:, None] & ~is_close_nV, -np.inf)


def _numbers(like: "Tensor", count: int) -> "Tensor":
    """Return the numbers from 0 on."""
    return like.new_ones(count).cumsum(0) - 1


@hookimpl
def callboard_logits_processor(context: LogitsProcessorContext) -> ThinkingBudget:
    """Build the processor; takes no options, as each request sets the number."""
    decode_options("logits_processor.thinking_budget", context.options, Options)
    return ThinkingBudget(context.vocab_size)
