"""A small vocabulary, and a walk along the masks of a grammar.

Owns: how a test asks whether a text is an output.  Does not know: what the grammars say.
"""

import numpy as np

from engine.plugins.grammar.llguidance import LLGuidance
from engine.text.grammar import Matcher
from engine.types.params import Grammar

BYTES = [bytes([byte]) for byte in range(256)]
EOS, CALL, CLOSE = 256, 257, 258
PIECES = [*BYTES, b"<eos>", b"<tool_call>", b"</think>", b"", b'{"a"']
VOCAB = 288  # of the model: the rest is padding
SPECIAL = [EOS, CALL, CLOSE, 259]
WORDS = VOCAB // 32
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


def allowed(matcher: Matcher) -> set[int]:
    mask = np.full(WORDS, -1, dtype=np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(engine: LLGuidance, grammar: Grammar, *parts: str | int) -> bool:
    """Whether text, with special tokens by id, is a whole output; every token must be allowed by the mask before it."""
    matcher = engine.compile(grammar).matcher()
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    for token in tokens:
        if token not in allowed(matcher):
            return False
        matcher.consume(token)
    return EOS in allowed(matcher)
