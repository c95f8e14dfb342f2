"""The pictures of journaled requests: their digests, and the prompts without them.

Does not know: where pictures come from, the journal.
"""

from collections.abc import Iterable

import msgspec

from engine.types.prompt import ChatTurn, Prompt


def digests_of(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return the digest of each picture, in their order."""
    return tuple(picture.digest for prompt in prompts for turn in _turns(prompt) for picture in turn.pictures)


def without_pictures(prompt: Prompt) -> Prompt:
    """Return a prompt of the same text."""
    turns = _turns(prompt)
    if not any(turn.pictures for turn in turns):
        return prompt
    return tuple(msgspec.structs.replace(turn, pictures=(), places=()) for turn in turns)


def _turns(prompt: Prompt) -> tuple[ChatTurn, ...]:
    """Return the turns of a conversation, and none for another prompt."""
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatTurn):
        turns: tuple[ChatTurn, ...] = prompt
        return turns
    return ()
