"""The proposer and the model: a draft model must fit it, and ranks need the terms.

Owns: the facts for ranks.  Does not know: the checks (``fitting.py``), drafting.
"""

from dataclasses import replace

import msgspec

from engine.features.speculation.fitting import fitting_model
from engine.features.speculation.messages import NAME
from engine.features.speculation.terms import Terms
from engine.plugins.features import ModelFit
from engine.plugins.kinds import PROPOSER
from engine.scheduling.proposer import DraftModel


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit with the path of a draft model resolved, and with the facts for ranks.

    Raises PluginError if a draft model does not fit, WeightsError if it cannot be read."""
    proposer = fit.proposer
    if proposer is None:
        return fit
    draft = None
    if isinstance(proposer, DraftModel):
        draft = proposer = fitting_model(
            proposer, fit.names[PROPOSER], fit.config, fit.spec, fit.max_len, fit.vocabulary
        )
    terms = Terms(draft=draft, num_proposed=proposer.num_tokens)
    return replace(fit, proposer=proposer, facts={**fit.facts, NAME: msgspec.msgpack.encode(terms)})
