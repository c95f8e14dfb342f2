"""Forbids repeated sequences of ``size`` tokens, over prompt and output: transformers' ``no_repeat_ngram_size``.

Legend: n rows · L tokens · G tokens of a gram · V vocabulary
"""

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from engine.plugins.hookspecs import LogitsProcessorContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.processors import LogitsRows

if TYPE_CHECKING:
    from torch import Tensor

CALLBOARD_PLUGIN = {"api": 1}

MOST_TOKENS = 64


class NoRepeatNgramParams(Options, frozen=True):
    """Parameters of a request.  size: tokens of a gram."""

    size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class NoRepeatNgram:
    """Finds earlier places of the last ``size - 1`` tokens, and forbids the tokens that followed them."""

    params = NoRepeatNgramParams

    def process(self, logits_nV: "Tensor", rows: LogitsRows) -> "Tensor":
        """Process row by row, as each row has its own length and size."""
        for index, (params, length) in enumerate(zip(rows.params, rows.host_lengths_n.tolist(), strict=True)):
            if length >= params.size:
                token_ids_L = rows.token_ids_nL[index, :length].long()
                grams_LG = token_ids_L.unfold(0, params.size, 1)
                found_L = (grams_LG[:, :-1] == token_ids_L[length - params.size + 1 :]).all(1)
                # Added with 0 where no gram was found, so that the host does not need their number.
                logits_nV[index].index_add_(
                    0, grams_LG[:, -1], logits_nV.new_zeros(len(found_L)).masked_fill_(found_L, -float("inf"))
                )
        return logits_nV


@hookimpl
def callboard_logits_processor(context: LogitsProcessorContext) -> NoRepeatNgram:
    """Build the processor; takes no options, as each request sets the size."""
    decode_options("logits_processor.no_repeat_ngram", context.options, Options)
    return NoRepeatNgram()
