"""The model's own layer for multi-token prediction: it drafts from the model's last states, and comes with the model.

Suited to models that are published with one, as Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4.5 are: it was trained with
the model, and takes the time of one of its layers.
Source: DeepSeek-AI 2024, DeepSeek-V3; a chain of the likeliest tokens is drafted, and sampling decides.
"""

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.proposer.draft_model import NumDrafted
from engine.scheduling.proposer import DraftModel

CALLBOARD_PLUGIN = {"api": 1}


class MTPOptions(Options, frozen=True):
    """Options of the plugin.  num_tokens: most tokens drafted at once."""

    num_tokens: NumDrafted = 3


@hookimpl
def callboard_proposer(context: ProposerContext) -> DraftModel:
    """Return the model's own layer with ``MTPOptions``."""
    options = decode_options("proposer.mtp", context.options, MTPOptions)
    return DraftModel(path="", num_tokens=options.num_tokens, reads_states=True, is_part=True)
