"""A vocabulary in which every token is one character, so that stop strings are as easy as stop tokens.

Owns: the alphabet.  Does not know: requests.  Streams, stop strings and detokenisation are the engine's own.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.text.chat import PLAIN
from engine.text.codec import EncodedChat, TextCodec
from engine.text.vocabulary import Vocabulary
from engine.types.errors import RequestError
from engine.types.prompt import ChatOptions, ChatTurn
from server.extensions.chaos.sim.oracle import VOCAB

# Printable ASCII first, then characters of two and three bytes.
ALPHABET = "".join(chr(33 + token if token < 90 else 0x700 + token) for token in range(VOCAB))
_TOKEN_OF = {character: token for token, character in enumerate(ALPHABET)}
_PIECES = [character.encode() for character in ALPHABET]


class SimCodec(TextCodec):
    """A codec of one character per token.

    eos_token_ids: special tokens, so they have no text."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        super().__init__(None)
        self.vocabulary = Vocabulary(_PIECES, eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, truncate_to: int = 0) -> npt.NDArray[np.int32]:
        """A token per character."""
        if not text:
            raise RequestError("prompt: empty, there is nothing to continue", param="prompt")
        return np.array([_TOKEN_OF[character] for character in text[: truncate_to or None]], dtype=np.int32)

    def encode_chat(self, turns: Sequence[ChatTurn], options: ChatOptions = PLAIN, truncate_to: int = 0) -> EncodedChat:
        """The contents, one after another."""
        return EncodedChat(self.encode("".join(turn.content for turn in turns), truncate_to=truncate_to), "none")


def text_of(tokens: Sequence[int]) -> str:
    """The characters of some tokens, special or not."""
    return "".join(ALPHABET[token] for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of some characters; -1 for one that no token has."""
    return [_TOKEN_OF.get(character, -1) for character in text]
