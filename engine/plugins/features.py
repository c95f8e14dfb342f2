"""The features of planners: optional parts that lie in folders of ``engine/features``.

Owns: which folders there are, and what a feature's planner half is built from.  Does not know: what a feature does.
A folder is found by looking, so deleting it removes the feature.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple

from engine.config import Config
from engine.scheduling.feature import NewFeature
from engine.scheduling.proposer import DraftModel, Proposer

FOLDER: Final = "engine.features"


class FeatureContext(NamedTuple):
    """What a planner's features are built from.

    proposer: what the plugin of that kind has built; None for none.  vocab_size: of the model."""

    config: Config
    proposer: Proposer | DraftModel | None
    vocab_size: int


def planner_features(context: FeatureContext) -> list[NewFeature]:
    """Return what builds the features that a configuration switches on, in the order of their folders' names.

    A folder's ``planner.py`` has a function ``planner_feature``, which returns None where the feature is off."""
    found: list[NewFeature] = []
    for name in feature_folders():
        module = f"{FOLDER}.{name}.planner"
        if find_spec(module) is not None and (build := import_module(module).planner_feature(context)) is not None:
            found.append(build)
    return found


def planner_watchers(clock: Callable[[], float]) -> dict[str, object]:
    """Return the watchers that features have for the planners of one engine, by the folder's name.

    A folder's ``watcher.py`` has a function ``planner_watcher``.  clock: seconds, see ``PlannerWatcher``."""
    watchers: dict[str, object] = {}
    for name in feature_folders():
        module = f"{FOLDER}.{name}.watcher"
        if find_spec(module) is not None:
            watchers[name] = import_module(module).planner_watcher(clock)
    return watchers


def feature_folders() -> list[str]:
    """Return the names of the folders of ``engine/features``, sorted."""
    return sorted(one.name for one in pkgutil.iter_modules(import_module(FOLDER).__path__) if one.ispkg)
