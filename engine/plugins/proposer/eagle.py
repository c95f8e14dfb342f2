"""An EAGLE-3 head: one layer that guesses from the model's own hidden states, trained for this one model.

For models that a head is published for: it takes a small part of a step's time, and is right more often than another
model of that size would be.
Source: Li et al. 2025, EAGLE-3; a chain of the likeliest tokens is drafted, and what is sampled decides.
"""

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.proposer.draft_model import DraftModelOptions, NumDrafted
from engine.scheduling.proposer import DraftModel

CALLBOARD_PLUGIN = {"api": 1}


class EagleOptions(DraftModelOptions, frozen=True):
    """Those of a draft model, with the head's checkpoint as ``path``."""

    num_tokens: NumDrafted = 3


@hookimpl
def callboard_proposer(context: ProposerContext) -> DraftModel:
    """Options: see ``EagleOptions``."""
    options = decode_options("proposer.eagle", context.options, EagleOptions)
    return DraftModel(path=options.path, num_tokens=options.num_tokens, reads_states=True)
