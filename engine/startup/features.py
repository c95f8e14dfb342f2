"""The rank halves of the features, found by a search of the folder of features.

Owns: the search, and the order.  Does not know: any feature by name.
"""

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import engine
from engine.execution.features import RankContext, RankFeature


def rank_features(context: RankContext) -> tuple[RankFeature, ...]:
    """Return the features that this rank uses, in their order.  Raises the errors of their builders."""
    found: list[RankFeature] = []
    for folder in pkgutil.iter_modules([f"{path}/features" for path in engine.__path__]):
        name = f"engine.features.{folder.name}.rank"
        if folder.ispkg and find_spec(name) is not None:
            feature = import_module(name).rank_feature(context)
            if feature is not None:
                found.append(feature)
    return tuple(sorted(found, key=lambda one: one.order))
