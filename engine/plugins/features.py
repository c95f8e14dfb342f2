"""The features of planners: optional parts that lie in folders of ``engine/features``.

Owns: the list of folders, and the arguments of a feature's planner half.  Does not know: what a feature does.
Folders are listed at run time, so deleting one removes the feature.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final, NamedTuple

from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.scheduling.feature import NewFeature
from engine.scheduling.proposer import DraftModel, Proposer
from engine.text.vocabulary import Vocabulary

FOLDER: Final = "engine.features"


class FeatureContext(NamedTuple):
    """The arguments of a planner's features.

    proposer: built by the plugin of that kind; None without one.  vocab_size: of the model."""

    config: Config
    proposer: Proposer | DraftModel | None
    vocab_size: int


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
    vocabulary: Vocabulary
    names: Mapping[str, str]
    proposer: Proposer | DraftModel | None
    facts: Facts = field(default_factory=dict)


def fitted(fit: ModelFit) -> ModelFit:
    """Return the fit as every feature leaves it.  Raises the features' errors for a model that one cannot serve.

    A folder's ``fit.py`` has a function ``fit_model``, which adds to the fit."""
    for module in _modules("fit"):
        fit = module.fit_model(fit)
    return fit


def check_successor(old: Facts, new: Facts, path: str) -> None:
    """Raise ConfigError if a feature cannot go on with the model at ``path`` in place of the one that is served.

    A folder's ``fit.py`` may have a function ``check_successor``."""
    for module in _modules("fit"):
        if hasattr(module, "check_successor"):
            module.check_successor(old, new, path)


def planner_features(context: FeatureContext) -> list[NewFeature]:
    """Return the constructors of the features that a configuration enables, in the order of their folders' names.

    A folder's ``planner.py`` has a function ``planner_feature``, which returns None if the feature is disabled."""
    found: list[NewFeature] = []
    for module in _modules("planner"):
        if (build := module.planner_feature(context)) is not None:
            found.append(build)
    return found


def planner_watchers(clock: Callable[[], float]) -> dict[str, object]:
    """Return the watchers of features for the planners of one engine: name of the folder -> watcher.

    A folder's ``watcher.py`` has a function ``planner_watcher``.  clock: seconds, see ``PlannerWatcher``."""
    watchers: dict[str, object] = {}
    for name in feature_folders():
        module = f"{FOLDER}.{name}.watcher"
        if find_spec(module) is not None:
            watchers[name] = import_module(module).planner_watcher(clock)
    return watchers


def _modules(name: str) -> Iterator[ModuleType]:
    """Return the modules of this name in the folders of features, in the order of the folders' names."""
    for folder in feature_folders():
        if find_spec(module := f"{FOLDER}.{folder}.{name}") is not None:
            yield import_module(module)


def feature_folders() -> list[str]:
    """Return the names of the folders of ``engine/features``, sorted."""
    return sorted(one.name for one in pkgutil.iter_modules(import_module(FOLDER).__path__) if one.ispkg)
