"""The bugs that can be planted, with the public issues of other engines that had one like it.

Owns: their names, the words about them, the kind of run that finds each.  Does not know: how one is planted.
An issue describes the same mistake at the same place of another engine's design, not the same lines.
"""

from dataclasses import dataclass

from server.extensions.chaos.fleet import bugs as fleet_bugs
from server.extensions.chaos.rejoin import bugs as rejoin_bugs
from server.extensions.chaos.sim import mutants, recovery_mutants, state_mutants
from server.extensions.chaos.sim.mutants import Mutant, mutants_of
from server.extensions.chaos.split import bugs as split_bugs

# The name of a bug -> an issue or pull request of another engine.
ISSUES = {
    "a_cancel_is_lost": "sgl-project/sglang#36876",
    "a_cancelled_transfer_keeps_its_pages": "vllm-project/vllm#46283",
    "a_claim_is_taken_after_its_end": "vllm-project/vllm#47021",
    "a_damaged_group_is_kept": "sgl-project/sglang#39229",
    "a_hang_is_not_noticed": "vllm-project/vllm#36451",
    "a_late_row_takes_part_without_its_mask": "tenstorrent/tt-xla#3706",
    "a_live_page_can_be_evicted": "sgl-project/mini-sglang#52",
    "a_loan_is_returned_twice": "vllm-project/vllm#25067",
    "a_loan_is_returned_while_it_is_read": "vllm-project/vllm-omni#6264",
    "a_lost_replica_is_still_chosen": "vllm-project/production-stack#420",
    "a_page_is_freed_twice": "vllm-project/vllm#42571",
    "a_rejected_page_is_published": "sgl-project/sglang#24175",
    "a_rejected_token_stays_in_the_state": "ml-explore/mlx-lm#1109",
    "a_retraction_forgets_a_token": "vllm-project/vllm#42117",
    "a_row_goes_on_a_token_too_late": "openvinotoolkit/openvino.genai#4190",
    "a_slot_is_filled_while_a_row_reads_it": "vllm-project/vllm#47724",
    "a_snapshot_is_off_by_a_page": "vllm-project/vllm#55601",
    "a_split_is_off_by_one": "vllm-project/vllm#37076",
    "a_state_is_published_before_its_step_completed": "vllm-project/vllm#56525",
    "a_transfer_has_no_end": "vllm-project/vllm#56640",
    "an_adapter_is_not_put_where_its_row_reads": "sgl-project/sglang#8263",
    "an_offer_never_ends": "vllm-project/vllm#41269",
    "an_unfinished_page_is_published": "sgl-project/sglang#38319",
    "an_unlock_is_missed": "bytedance-iaas/sglang#508",
    "damaged_pages_are_used": "vllm-project/vllm#19329",
    "gaps_count_as_pages": "vllm-project/vllm-ascend#10561",
    "one_page_too_many_is_adopted": "vllm-project/vllm#50558",
    "pages_are_cached_under_the_wrong_adapter": "ggml-org/llama.cpp#26207",
    "pages_come_back_without_a_state": "sgl-project/sglang#39830",
    "pages_without_a_state_are_matched": "vllm-project/vllm#47491",
    "requests_wait_for_a_tokenizer_that_is_gone": "sgl-project/sglang#33858",
    "the_cache_outlives_the_device": "NVIDIA-NeMo/RL#4018",
    "the_store_does_not_know_salts": "vllm-project/vllm#44250",
    "the_youngest_goes_first": "sgl-project/sglang#31954",
    "transfers_come_a_step_late": "vllm-project/vllm#46278",
    "what_a_lost_replica_held_is_remembered": "llm-d/llm-d-router#2853",
    "who_waits_for_the_store_cannot_be_cancelled": "vllm-project/vllm-ascend#16662",
}


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug.  kind: of the runs that find it."""

    kind: str
    mutant: Mutant

    @property
    def name(self) -> str:
        """Return the name of the function that describes it."""
        return self.mutant.name

    @property
    def place(self) -> str:
        """Return the method that it replaces."""
        return f"{getattr(self.mutant.owner, '__name__', self.mutant.owner)}.{self.mutant.method}"

    @property
    def issue(self) -> str:
        """Return another engine's issue, or ''."""
        return ISSUES.get(self.name, "")


def all_bugs() -> dict[str, Bug]:
    """Return the bugs by name."""
    modules = {
        "engine": mutants,
        "states": state_mutants,
        "workers": recovery_mutants,
        "fleet": fleet_bugs,
        "split": split_bugs,
        "rejoin": rejoin_bugs,
    }
    return {mutant.name: Bug(kind, mutant) for kind, module in modules.items() for mutant in mutants_of(module)}
