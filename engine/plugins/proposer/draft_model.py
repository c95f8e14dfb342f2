"""A smaller model with the same tokenizer, which the executors load next to the model to draft tokens.

Suited to text that earlier text does not predict, on machines where the model itself takes most of a step's time: a
draft model that takes a tenth of it and is right two times of three makes decoding about twice as fast.
Source: Leviathan et al. 2022, speculative decoding; here the likeliest token is drafted, and sampling decides.
"""

from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.proposer import DraftModel

CALLBOARD_PLUGIN = {"api": 1}
NumDrafted = Annotated[int, Meta(ge=1, le=64)]


class DraftModelOptions(Options, frozen=True):
    """Options of the plugin.  path: of its checkpoint, as ``model.path``.  num_tokens: most tokens drafted at once."""

    path: Annotated[str, Meta(min_length=1)]
    num_tokens: NumDrafted = 4


@hookimpl
def callboard_proposer(context: ProposerContext) -> DraftModel:
    """Return the draft model with ``DraftModelOptions``."""
    options = decode_options("proposer.draft_model", context.options, DraftModelOptions)
    return DraftModel(path=options.path, num_tokens=options.num_tokens)
