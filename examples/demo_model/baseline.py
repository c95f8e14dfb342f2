"""Owns the yardstick: an interpolated byte n-gram model, and what xz makes of the same text.

The n-gram uses Witten-Bell interpolation: each order is mixed with the one below it in proportion
to how often its context has been followed by something new. Contexts are at most 7 bytes, so a
context and the byte after it fit one 64-bit integer and every count is exact, without hashing.
"""

import lzma
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Probabilities = npt.NDArray[np.float64]
LONGEST = 8


@dataclass(frozen=True)
class Baseline:
    """Bits per byte on the held-out files."""

    bits_by_order: dict[int, float]
    """n -> bits per byte of the n-gram, that is with n - 1 bytes of context."""
    xz_bits: float

    @property
    def best_order(self) -> int:
        """The n that does best; choosing it on the held-out files favours the baseline."""
        return min(self.bits_by_order, key=lambda order: self.bits_by_order[order])


def rolling_keys(texts: list[bytes]) -> Keys:
    """Every byte of `texts` together with the 7 before it, as one integer per byte.

    Each text is preceded by NUL bytes, which occur in no source, so that its beginning is a
    context of its own and nothing leaks from the text before it.
    """
    padding = bytes(LONGEST - 1)
    data = np.frombuffer(b"".join(padding + text for text in texts), dtype=np.uint8)
    keys = data.astype(np.uint64)
    for back in range(1, LONGEST):
        keys[back:] |= data[:-back].astype(np.uint64) << np.uint64(8 * back)
    starts = np.cumsum([0, *(len(padding) + len(text) for text in texts)])[:-1]
    real = np.ones(len(data), dtype=bool)
    for offset in range(len(padding)):
        real[starts + offset] = False
    return keys[real]


def look_up(table: Keys, values: npt.NDArray[np.int64], wanted: Keys) -> npt.NDArray[np.int64]:
    """The value stored for each wanted key in a sorted table, 0 where there is none."""
    place = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[place] == wanted, values[place], 0)


def add_order(order: int, train: Keys, held_out: Keys, lower: Probabilities) -> Probabilities:
    """Interpolate the n-gram of `order` with the probabilities of the order below."""
    mask = np.uint64((1 << (8 * order)) - 1)
    grams, counts = np.unique(train & mask, return_counts=True)
    contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, first)
    kinds = np.diff(np.append(first, len(grams)))
    wanted = held_out & mask
    seen = look_up(grams, counts, wanted)
    total = look_up(contexts, totals, wanted >> np.uint64(8))
    novel = look_up(contexts, kinds, wanted >> np.uint64(8))
    mixed = (seen + novel * lower) / np.maximum(total + novel, 1)
    return np.where(total > 0, mixed, lower)


def measure_baseline(train: list[str], held_out: list[str]) -> Baseline:
    """Fit on `train`, measure on `held_out`."""
    held_out_bytes = [text.encode() for text in held_out]
    train_keys = rolling_keys([text.encode() for text in train])
    held_out_keys = rolling_keys(held_out_bytes)
    probabilities: Probabilities = np.full(len(held_out_keys), 1 / 256)
    bits: dict[int, float] = {}
    for order in range(1, LONGEST + 1):
        probabilities = add_order(order, train_keys, held_out_keys, probabilities)
        bits[order] = float(-np.log2(probabilities).mean())
    joined = b"".join(held_out_bytes)
    packed = lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)
    return Baseline(bits, 8 * len(packed) / len(joined))
