"""The rank halves of the features, found by a search of the folder of features.

Owns: the search, the order, and what ends them where a rank cannot be loaded.  Does not know: any feature by name.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.execution.features import RankContext, RankFeature
from engine.plugins.features import feature_modules


def rank_features(context: RankContext) -> tuple[RankFeature, ...]:
    """Return the features that this rank uses, in their order.  Raises the errors of their builders."""
    features: list[RankFeature] = []
    with left_on_failure(features):
        for module in feature_modules("rank").values():
            if (feature := module.rank_feature(context)) is not None:
                features.append(feature)
    return tuple(sorted(features, key=lambda one: one.order))


@contextmanager
def left_on_failure(features: Iterable[RankFeature]) -> Iterator[None]:
    """Let the features leave if the block fails: threads and processes of theirs would go on without a rank."""
    try:
        yield
    except BaseException:
        for one in features:
            one.leave()
        raise
