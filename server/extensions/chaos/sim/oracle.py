"""The model that the simulated device runs, and what it says of a prompt when nothing disturbs it.

Owns: the arithmetic.  Does not know: pages, steps, requests.
A token's K/V is a number that chains all tokens up to it: the one before plus a hash of token and position, and plus a
number of the adapter's.  The next token is a hash of all these numbers, each weighted by its position.  So one value
read from a wrong, stale or foreign place changes every token after it.  Sums modulo 2^64 because numpy computes them
for many rows at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from server.extensions.chaos.sim.luck import MASK, scramble

U64 = npt.NDArray[np.uint64]

VOCAB = 512
MAX_LEN = 2048

TOKEN_SALT: U64 = np.array([scramble(token + 1) for token in range(VOCAB)], dtype=np.uint64)
POSITION_SALT: U64 = np.array([scramble((position + 1) << 20) for position in range(MAX_LEN)], dtype=np.uint64)
WEIGHT: U64 = np.array([scramble((position + 1) << 40) | 1 for position in range(MAX_LEN)], dtype=np.uint64)
ADAPTERS = ("", "a", "b", "c", "d")  # by their digests; the first is none
ADAPTER_SALT = {name: scramble(number << 50) if number else 0 for number, name in enumerate(ADAPTERS)}
_SPREAD = 0xD6E8FEB86659FD93
_SPREAD_U64 = np.uint64(_SPREAD)
_SHIFT, _DROP, _VOCAB_U64 = np.uint64(32), np.uint64(40), np.uint64(VOCAB)
_TOKEN_SALTS, _POSITION_SALTS, _WEIGHTS = TOKEN_SALT.tolist(), POSITION_SALT.tolist(), WEIGHT.tolist()


def hashes(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> U64:
    """Return the number that each token adds to the chain."""
    return (TOKEN_SALT[tokens] ^ POSITION_SALT[positions]) * _SPREAD_U64


def next_tokens(sums: U64) -> npt.NDArray[np.int64]:
    """The next token for each weighted sum of a context's K/V."""
    mixed = (sums ^ (sums >> _SHIFT)) * _SPREAD_U64
    return ((mixed >> _DROP) % _VOCAB_U64).astype(np.int64)


class Oracle:
    """The tokens that follow a prompt, one by one; constant time for each."""

    def __init__(self, prompt: npt.NDArray[np.int32], adapter: str = "") -> None:
        self.position = len(prompt)
        self._salt = ADAPTER_SALT[adapter]
        added = hashes(prompt.astype(np.int64), np.arange(len(prompt))) + np.uint64(self._salt)
        chain = np.cumsum(added)
        self._last = int(chain[-1])
        self._sum = int(np.add.reduce(chain * WEIGHT[: len(prompt)]))

    def next(self) -> int:
        """The next token, which the ones after it then continue."""
        mixed = ((self._sum ^ (self._sum >> 32)) * _SPREAD) & MASK
        token = (mixed >> 40) % VOCAB
        position = self.position
        self._last = (self._last + (_TOKEN_SALTS[token] ^ _POSITION_SALTS[position]) * _SPREAD + self._salt) & MASK
        self._sum = (self._sum + self._last * _WEIGHTS[position]) & MASK
        self.position = position + 1
        return token


def continuation(prompt: npt.NDArray[np.int32], count: int, adapter: str = "") -> list[int]:
    """The first ``count`` tokens after a prompt."""
    oracle = Oracle(prompt, adapter)
    return [oracle.next() for _ in range(count)]


def as_prompt(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Token ids as messages carry them."""
    return np.array(tokens, dtype=np.int32)
