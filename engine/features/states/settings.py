"""The part of the section [kv] about the recurrent states of cached prefixes."""

from typing import Annotated, ClassVar, Literal

from engine.features.states.policy import EndsAndBranches
from engine.settings.section import Addition, key


class StatesSettings(Addition, frozen=True):
    """The part of [kv] about snapshots of states, for models that have recurrent layers."""

    table: ClassVar[str] = "kv"

    keep_states: Annotated[tuple[Literal["prompts", "turns", "branches"], ...], key(
        "Where snapshots of recurrent states are kept: behind the last full page of 'prompts' and of 'turns' (a prompt "
        "and its output), and at 'branches', where a prompt leaves cached pages"
    )] = ("prompts", "turns", "branches")
    keep_states_every: Annotated[int, key(
        "Pages of a prompt between two more snapshots of recurrent states; 0 for none", ge=0
    )] = 0
    pages_per_state: Annotated[int, key(
        "Pages of the pool for each slot of a snapshot, in addition to one slot for each running request", ge=1
    )] = 64

    @property
    def policy(self) -> EndsAndBranches:
        """The policy that these settings describe."""
        return EndsAndBranches(
            keeps_prompts="prompts" in self.keep_states,
            keeps_turns="turns" in self.keep_states,
            keeps_branches="branches" in self.keep_states,
            every=self.keep_states_every,
        )

    def num_snapshots(self, num_pages: int, max_running: int) -> int:
        """Return the number of slots of snapshots next to a pool of so many pages."""
        return max_running + num_pages // self.pages_per_state
