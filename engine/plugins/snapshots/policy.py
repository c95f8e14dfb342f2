"""The policy of snapshots: after which pages of a prompt, and of what follows it, a state is kept."""

import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.plugins.hookspecs import SnapshotContext
from engine.plugins.manager import Plugins
from engine.plugins.snapshots.kind import SNAPSHOTS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptPages:
    """The tokens of a row that starts, in pages.

    num_pages: all full ones, without the last token, which is computed in any case.
    num_of_prompt: how many of them are the request's prompt; a row that starts again has some output too.
    num_cached: how many of them are in the cache.
    num_with_state: how many of these the row uses; the rest has no state behind it, and is computed again."""

    num_pages: int
    num_of_prompt: int
    num_cached: int
    num_with_state: int


@runtime_checkable
class SnapshotPolicy(Protocol):
    """The places where snapshots are taken.

    keeps_turns: whether the state behind the last full page of an output is kept when it ends.
    keeps_branches: whether a prompt that another one waits for keeps its state where the two part."""

    @property
    def keeps_turns(self) -> bool: ...
    @property
    def keeps_branches(self) -> bool: ...

    def of_prompt(self, found: PromptPages) -> list[int]:
        """Return numbers of pages after which the state of a prompt is to be kept.

        Those that are cached with a state, or that the prompt does not have, are left out.  Each ends a chunk of the
        prompt, so each may cost a step."""
        ...


class GuardedSnapshots:
    """Guards a policy of a third party: after a failure, prompts keep no states.  name: the plugin's."""

    def __init__(self, name: str, policy: SnapshotPolicy) -> None:
        self.keeps_turns, self.keeps_branches = bool(policy.keeps_turns), bool(policy.keeps_branches)
        self._name = name
        self._policy: SnapshotPolicy | None = policy

    def of_prompt(self, found: PromptPages) -> list[int]:
        """Return the plugin's places, or none after a failure."""
        if self._policy is None:
            return []
        try:
            places = self._policy.of_prompt(found)
            if not isinstance(places, list) or not all(type(one) is int for one in places):
                raise TypeError(f"its places are {places!r:.100}, not a list of numbers of pages")
        except BaseException:  # even sys.exit, which would end the server
            log.exception("plugin %s failed and is not called again; prompts keep no states", self._name)
            self._policy = None
            return []
        return places


def snapshot_policy(plugins: Plugins, page_size: int) -> SnapshotPolicy:
    """Build the policy.  Raises PluginError if the plugin raises or returns something else."""
    name = plugins.names[SNAPSHOTS]
    policy = plugins.build(name, SnapshotContext(page_size), SnapshotPolicy)
    return policy if plugins.known[name].built_in else GuardedSnapshots(name, policy)
