"""Hand-overs and the model: the states of a proposer do not move."""

from engine.plugins.features import ModelFit
from engine.plugins.kinds import PROPOSER, chosen_plugins
from engine.plugins.transfer.kind import TRANSFER
from engine.scheduling.proposer import DraftModel
from engine.types.errors import PluginError


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit.  Raises PluginError for a proposer that reads the model's states, which do not move."""
    carrier = chosen_plugins(fit.config).get(TRANSFER)
    if carrier is None:
        return fit
    if isinstance(fit.proposer, DraftModel) and fit.proposer.reads_states:
        raise PluginError(
            f"plugin {fit.names[PROPOSER]}: plugins.transfer={carrier} does not move the model states it reads; set it "
            "to 'none'"
        )
    return fit
