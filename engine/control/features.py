"""The features of an engine, found by a search of the folder of features.

Owns: the search.  Does not know: any feature by name.
"""

from engine.actors.feature import EngineContext, EngineFeature
from engine.plugins.features import feature_modules


def engine_features(context: EngineContext) -> dict[str, EngineFeature]:
    """Return the features that an engine uses: name of the folder -> feature, sorted.  Raises ConfigError.

    A folder's ``engine.py`` has a function ``engine_feature``, which returns None if the feature is disabled."""
    features = {name: module.engine_feature(context) for name, module in feature_modules("engine").items()}
    return {name: one for name, one in features.items() if one is not None}
