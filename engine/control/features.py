"""The features of an engine, found by a search of the folder of features.

Owns: the search.  Does not know: any feature by name.
"""

from importlib import import_module
from importlib.util import find_spec

from engine.actors.feature import EngineContext, EngineFeature
from engine.plugins.features import FOLDER, feature_folders


def engine_features(context: EngineContext) -> dict[str, EngineFeature]:
    """Return the features that an engine uses: name of the folder -> feature, sorted.  Raises ConfigError.

    A folder's ``engine.py`` has a function ``engine_feature``, which returns None if the feature is disabled."""
    found: dict[str, EngineFeature] = {}
    for name in feature_folders():
        module = f"{FOLDER}.{name}.engine"
        if find_spec(module) is not None and (one := import_module(module).engine_feature(context)) is not None:
            found[name] = one
    return found
