"""Snapshots at the ends of prompts and outputs, and where prompts part.  The default."""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from engine.plugins.hookspecs import SnapshotContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.snapshots.policy import PromptPages

CALLBOARD_PLUGIN = {"api": 1}
LONG: Final = 32  # pages that are computed; less is rarely a document
BEFORE_END: Final = 16  # a multiple of so many pages is at most so far before the end


class EndsOptions(Options, frozen=True):
    """The options: whether snapshots are kept at each kind of place."""

    prompts: bool = True
    turns: bool = True
    branches: bool = True
    every: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class EndsAndBranches:
    """Snapshots at the ends of prompts and of outputs, where prompts part, and every so many pages.

    Where a prompt leaves cached pages, two prompts part, and a third may come.  If much of a prompt is new, it may be
    a document and a question: others about the same document part a little before its end.
    every: 0 for none of the last kind."""

    keeps_prompts: bool = True
    keeps_turns: bool = True
    keeps_branches: bool = True
    every: int = 0

    def of_prompt(self, found: PromptPages) -> list[int]:
        """Return the ends, the place where it leaves what is cached, and multiples of ``every``."""
        wanted = [*range(self.every, found.num_pages + 1, self.every)] if self.every else []
        if self.keeps_branches:
            wanted.append(found.num_cached)
            if found.num_pages - found.num_with_state >= LONG:
                wanted.append(found.num_pages // BEFORE_END * BEFORE_END)
        if self.keeps_prompts:
            wanted += [found.num_of_prompt, found.num_pages]
        return wanted


@hookimpl
def callboard_snapshot_policy(context: SnapshotContext) -> EndsAndBranches:
    """Build the policy.  Raises PluginError for a wrong option."""
    options = decode_options("snapshots.ends", context.options, EndsOptions)
    return EndsAndBranches(options.prompts, options.turns, options.branches, options.every)
