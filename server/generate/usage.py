"""Token counts of a generation while its choices run and after.

Owns: the sums.  Does not know: how they are shown.
"""

import msgspec
from msgspec import UNSET, UnsetType

from engine.messages import Delta, Finish
from server.generate.generation import Generation

TOKEN_ID_BYTES = 4


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How much of the completion was thought and not answer."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


OptionalUsage = UsageBody | None | UnsetType


class UsageCounter:
    """Counts deltas as they pass.

    A prompt counts once however many choices it has, and so do its cached tokens: they are those of its first
    choice, since the others find in the cache what the first one put there.
    """

    def __init__(self, generation: Generation) -> None:
        num_prompts = len(generation.prompts)
        self._num_choices = generation.num_choices
        self._prompt_tokens: list[int | None] = [None] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self._reasoning_tokens = [0] * (num_prompts * generation.num_choices)
        self._completion_tokens = [0] * (num_prompts * generation.num_choices)

    def add(self, index: int, delta: Delta) -> None:
        """Count new output of a choice."""
        self._completion_tokens[index] += len(delta.token_ids) // TOKEN_ID_BYTES
        if delta.usage is None:
            return
        prompt, k = divmod(index, self._num_choices)
        self._prompt_tokens[prompt] = delta.usage.prompt_tokens
        if k == 0:
            self._cached_tokens[prompt] = delta.usage.cached_tokens
        # What was aborted has no last word from the engine, only what was counted on the way.
        if delta.finish not in (Finish.RUNNING, Finish.ABORT):
            self._completion_tokens[index] = delta.usage.completion_tokens
            self._reasoning_tokens[index] = delta.usage.reasoning_tokens

    def of_choice(self, index: int) -> UsageBody | None:
        """The counts of one choice so far; None until the engine has told the length of its prompt."""
        prompt = index // self._num_choices
        num_prompt_tokens = self._prompt_tokens[prompt]
        if num_prompt_tokens is None:
            return None
        return _usage(
            num_prompt_tokens,
            self._completion_tokens[index],
            self._cached_tokens[prompt],
            self._reasoning_tokens[index],
        )

    def total(self) -> UsageBody:
        """The counts of the whole request."""
        return _usage(
            sum(count or 0 for count in self._prompt_tokens),
            sum(self._completion_tokens),
            sum(self._cached_tokens),
            sum(self._reasoning_tokens),
        )


def _usage(prompt: int, completion: int, cached: int, reasoning: int) -> UsageBody:
    details = CompletionTokensDetails(reasoning) if reasoning else UNSET
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)
