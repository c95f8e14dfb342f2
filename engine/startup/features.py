"""The rank halves of the features, found by a search of the folder of features.

Owns: the search, and the order.  Does not know: any feature by name.
"""

from engine.execution.features import RankContext, RankFeature
from engine.plugins.features import feature_modules


def rank_features(context: RankContext) -> tuple[RankFeature, ...]:
    """Return the features that this rank uses, in their order.  Raises the errors of their builders."""
    features = [module.rank_feature(context) for module in feature_modules("rank").values()]
    return tuple(sorted((one for one in features if one is not None), key=lambda one: one.order))
