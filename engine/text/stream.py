"""One request's output as it becomes visible: detokenised, told apart from thoughts, cut at a stop string.

Owns: the order of the three, and how many tokens the visible text took.  Does not know: messages, why a request ends.
"""

from engine.params import SamplingParams
from engine.text.detokenizer import Detokenizer, TokenIds
from engine.text.reasoning import ReasoningSplitter, Thinking
from engine.text.stops import StopMatcher
from engine.text.vocabulary import Vocabulary


class TextStream:
    """The text of one output.  Stop strings are not looked for in thoughts.

    num_tokens: how many were taken; with a stop string, up to the one that completed it.
    num_reasoning_tokens: how many of them the model thought with.
    Everything returned by ``push`` and ``finish``, joined, is the same however the tokens are grouped.
    """

    __slots__ = (
        "_detokenizer", "_matcher", "_min_tokens", "_splitter", "_thoughts", "num_reasoning_tokens", "num_tokens",
    )  # fmt: skip

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: TokenIds, params: SamplingParams, thinking: Thinking = "none"
    ) -> None:
        """prompt_ids: what the output continues, also where it is not shown.  thinking: how to tell thoughts apart."""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._splitter = None if thinking == "none" else ReasoningSplitter(thinking)
        self._thoughts: list[str] = []
        self._detokenizer = Detokenizer(
            vocabulary, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids
        )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text; from then on nothing more becomes visible."""
        return self._matcher.matched if self._matcher else None

    def push(self, token_ids: TokenIds) -> str:
        """The text that is visible now.  A token that ends the sequence and is not to be shown must not be pushed."""
        if self._matcher is None and self._splitter is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        visible = []
        for token_id in token_ids:
            if self._matcher is not None and self._matcher.matched is not None:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self._splitter is not None:
                text = self._without_thoughts(self._splitter, text)
            if self._matcher is None:
                visible.append(text)
                continue
            # Text of the first min_tokens tokens is not searched: nothing may stop before them.
            visible.append(self._matcher.push(text) if self.num_tokens > self._min_tokens else text)
        return "".join(visible)

    def finish(self) -> str:
        """The text that was held back, since no more tokens come.  It may still hold a stop string."""
        text = self._detokenizer.finish()
        if self._splitter is not None:
            text = self._without_thoughts(self._splitter, text, more=False)
        if self._matcher is None:
            return text
        return self._matcher.push(text) + self._matcher.finish()

    def take_thoughts(self) -> str:
        """The thoughts since the last call."""
        thoughts = "".join(self._thoughts)
        self._thoughts.clear()
        return thoughts

    def _without_thoughts(self, splitter: ReasoningSplitter, text: str, *, more: bool = True) -> str:
        """The answer's part of a token's text; without ``more`` also what was held back."""
        was_inside = splitter.inside
        thoughts, answer = splitter.push(text)
        if more:
            self.num_reasoning_tokens += was_inside or splitter.inside
        else:
            rest = splitter.finish()
            thoughts, answer = thoughts + rest[0], answer + rest[1]
        if thoughts:
            self._thoughts.append(thoughts)
        return answer
