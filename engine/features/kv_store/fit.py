"""A store of pages and the model: what it cannot keep."""

from engine.plugins.features import ModelFit
from engine.plugins.kinds import PROPOSER, chosen_plugins
from engine.plugins.kv_store.kind import KV_STORE
from engine.scheduling.proposer import DraftModel
from engine.types.errors import PluginError


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit.  Raises PluginError for a proposer that reads states of the model: a store does not keep them."""
    store = chosen_plugins(fit.config).get(KV_STORE)
    if store is not None and isinstance(fit.proposer, DraftModel) and fit.proposer.reads_states:
        raise PluginError(
            f"plugin {fit.names[PROPOSER]}: plugins.kv_store={store} does not keep the model states it reads; set it "
            "to 'none'"
        )
    return fit
