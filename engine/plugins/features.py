"""The features of planners and checkpoints: optional parts that lie in folders of ``engine/features``.

Owns: the list of folders, and the arguments of a feature's planner half.  Does not know: what a feature does.
Folders are listed at run time, so deleting one removes the feature.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.feature import CheckpointFeature
from engine.config import Config

if TYPE_CHECKING:
    from engine.plugins.manager import Plugins
    from engine.scheduling.feature import NewFeature
    from engine.scheduling.proposer import DraftModel, Proposer
    from engine.text.vocabulary import Vocabulary

FOLDER: Final = "engine.features"


class FeatureContext(NamedTuple):
    """The arguments of a planner's features.

    proposer: built by the plugin of that kind; None without one.  vocab_size: of the model.
    state_bytes: as in ``PlannerLimits``.  found: names of features that have facts of the model.
    plugins: those that affect plans, loaded."""

    config: Config
    proposer: "Proposer | DraftModel | None"
    vocab_size: int
    state_bytes: int = 0
    found: tuple[str, ...] = ()
    plugins: "Plugins | None" = None


Facts = Mapping[str, bytes]
"""Name of a feature -> what it has found of a model, as the feature encodes it, for ranks and the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """A model and what features have found of it, before weights are loaded.

    names: kind of plugin -> the chosen one.  proposer: built by its plugin; None without one.
    vocabulary: of the model; empty without a tokenizer."""

    config: Config
    spec: ModelSpec
    max_len: int
    vocabulary: "Vocabulary"
    names: Mapping[str, str]
    proposer: "Proposer | DraftModel | None"
    facts: Facts = field(default_factory=dict)


def fitted(fit: ModelFit) -> ModelFit:
    """Return the fit as every feature leaves it.  Raises the features' errors for a model that one cannot serve.

    A folder's ``fit.py`` has a function ``fit_model``, which adds to the fit."""
    for module in feature_modules("fit").values():
        fit = module.fit_model(fit)
    return fit


def check_successor(old: Facts, new: Facts, path: str) -> None:
    """Raise ConfigError if a feature cannot go on with the model at ``path`` in place of the one that is served.

    A folder's ``fit.py`` may have a function ``check_successor``."""
    for module in feature_modules("fit").values():
        if hasattr(module, "check_successor"):
            module.check_successor(old, new, path)


def planner_features(context: FeatureContext) -> "list[NewFeature]":
    """Return the constructors of the features that a configuration enables, in the order of their folders' names.

    A folder's ``planner.py`` has a function ``planner_feature``, which returns None if the feature is disabled."""
    found: list[NewFeature] = []
    for module in feature_modules("planner").values():
        if (build := module.planner_feature(context)) is not None:
            found.append(build)
    return found


def planner_watchers(clock: Callable[[], float]) -> dict[str, object]:
    """Return the watchers of features for the planners of one engine: name of the folder -> watcher.

    A folder's ``watcher.py`` has a function ``planner_watcher``.  clock: seconds, see ``PlannerWatcher``."""
    return {name: module.planner_watcher(clock) for name, module in feature_modules("watcher").items()}


def checkpoint_features() -> list[CheckpointFeature]:
    """Return the features that read checkpoints, in the order of their folders' names.

    A folder's ``checkpoint.py`` has a function ``checkpoint_feature``."""
    return [module.checkpoint_feature() for module in feature_modules("checkpoint").values()]


def feature_modules(half: str) -> dict[str, Any]:
    """Return the modules of this name in the folders of ``engine/features``: name of the folder -> module, sorted."""
    folders = sorted(one.name for one in pkgutil.iter_modules(import_module(FOLDER).__path__) if one.ispkg)
    names = {folder: f"{FOLDER}.{folder}.{half}" for folder in folders}
    return {folder: import_module(name) for folder, name in names.items() if find_spec(name) is not None}
