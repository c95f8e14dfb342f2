"""An EAGLE-3 head: one layer that drafts from the model's own hidden states, trained for this one model.

Suited to models with a published head: it takes a small part of a step's time, and is right more often than another
model of that size would be.
Source: Li et al. 2025, EAGLE-3; a chain of the likeliest tokens is drafted, and sampling decides.
"""

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.proposer.draft_model import DraftModelOptions, NumDrafted
from engine.scheduling.proposer import DraftModel

CALLBOARD_PLUGIN = {"api": 1}


class EagleOptions(DraftModelOptions, frozen=True):
    """Options of the plugin: those of a draft model, with the head's checkpoint as ``path``."""

    num_tokens: NumDrafted = 3


@hookimpl
def callboard_proposer(context: ProposerContext) -> DraftModel:
    """Return the draft head with ``EagleOptions``."""
    options = decode_options("proposer.eagle", context.options, EagleOptions)
    return DraftModel(path=options.path, num_tokens=options.num_tokens, reads_states=True)
