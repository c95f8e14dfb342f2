"""The policy of snapshots: after which pages of a prompt, and of what follows it, a state is kept."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

LONG: Final = 32  # pages that are computed; less is rarely a document
BEFORE_END: Final = 16  # a multiple of so many pages is at most so far before the end


@dataclass(frozen=True, slots=True)
class Found:
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

    def of_prompt(self, found: Found) -> Iterable[int]:
        """Return numbers of pages after which the state of a prompt is to be kept.

        Those that are cached with a state, or that the prompt does not have, are left out.  Each ends a chunk of the
        prompt, so each may cost a step."""
        ...


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

    def of_prompt(self, found: Found) -> list[int]:
        """Return the ends, the place where it leaves what is cached, and multiples of ``every``."""
        wanted = [*range(self.every, found.num_pages + 1, self.every)] if self.every else []
        if self.keeps_branches:
            wanted.append(found.num_cached)
            if found.num_pages - found.num_with_state >= LONG:
                wanted.append(found.num_pages // BEFORE_END * BEFORE_END)
        if self.keeps_prompts:
            wanted += [found.num_of_prompt, found.num_pages]
        return wanted
