"""The host tier in the planner: a tree with two tiers, and the copies between them, which travel with the next step.

Owns: the columns of a step that hold them.  Does not know: which pages are copied (``HostTier`` decides).
"""

import numpy as np

from engine.features.host_tier.messages import Transfers
from engine.features.host_tier.settings import HostTierSettings
from engine.features.host_tier.tree import TieredTree
from engine.kv.node import Handle
from engine.kv.pages import Pages
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import StepBuilder


class HostTierPlanner(PlannerFeature):
    """The host tier in one planner."""

    def __init__(self, parts: PlannerParts) -> None:
        self._pages = parts.pages
        self._pages.use(TieredTree, num_host_pages=parts.limits.num_host_pages)

    @property
    def _tree(self) -> TieredTree:
        tree = self._pages.tree
        assert isinstance(tree, TieredTree)
        return tree

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        """Let the copies of pages on the host fill the first of the new pages, which the tree owns from then on."""
        self._tree.restore(handle, key, pages)

    def gauges(self) -> dict[str, int]:
        """Return the number of host pages that hold something."""
        return {"host_pages_used": self._tree.host.num_used}

    def attach(self, step: StepBuilder) -> None:
        """Add the copies since the last step, in the order in which they must happen."""
        if transfers := self._tree.drain_transfers():
            directions = [np.full(len(one.host_pages), one.to_host, dtype=np.int32) for one in transfers]
            to_host = np.concatenate(directions)
            device_pages = np.concatenate([one.device_pages for one in transfers])
            step.parts |= Transfers(
                to_host=to_host.tobytes(),
                device_pages=device_pages.tobytes(),
                host_pages=np.concatenate([one.host_pages for one in transfers]).tobytes(),
            ).part()
            step.filled_pages.append(device_pages[to_host == 0].tobytes())
            step.num_copied += len(to_host)


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None without host pages."""
    return HostTierPlanner if HostTierSettings.of(context.config).num_host_pages else None
