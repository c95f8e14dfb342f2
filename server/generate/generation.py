"""What one HTTP request asks of the engine, in the engine's terms.

Owns: what the generating endpoints' flow needs to know of a request, and how the choices of one prompt get their seeds.
Does not know: JSON, request fields, responses.
"""

import msgspec

from engine.messages import ChatOptions
from engine.params import MAX_SEED, SamplingParams
from engine.text.tool_calls import ToolCallParser
from engine.text.tool_format import ToolFormat
from server.backend import Prompt


class ToolUse(msgspec.Struct, frozen=True):
    """How calls are read from an output.  max_calls: later ones are dropped; None for no limit.
    exact: a grammar says how they are written.  forced: it allows nothing else."""

    form: ToolFormat
    names: frozenset[str]
    max_calls: int | None
    exact: bool = False
    forced: bool = False

    def parser(self) -> ToolCallParser:
        """For one choice."""
        return ToolCallParser(self.form, self.names, self.max_calls, exact=self.exact, forced=self.forced)


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One or more prompts, ``num_choices`` outputs for each; choice i * num_choices + k is prompt i's k-th."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    num_choices: int
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str
    chat: ChatOptions = ChatOptions()
    tools: ToolUse | None = None
    prompt_only: bool = False
    num_wanted: int | None = None  # of each prompt's choices the best ones are answered; None for all
    shows_logprobs: bool = True
    shows_token_ids: bool = False
    names_tokens_by_id: bool = False
    request_id: str = ""  # what the client calls it
    max_tokens_field: str = "max_tokens"  # in which it was given


def choice_seed(seed: int | None, k: int) -> int | None:
    """Seed of a prompt's k-th choice.  The first keeps the request's own, so that n=1 and n=8 begin alike."""
    if seed is None or k == 0:
        return seed
    # One round of splitmix64 (Steele et al. 2014): neighbouring inputs give unrelated seeds.
    mask = (1 << 64) - 1
    x = (seed + k * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) & MAX_SEED
