"""Chance that replays: every draw is a hash of what it is drawn for.

Owns: the hash.  Does not know: what is drawn.  A stream of random numbers would shift for everything that comes after
a removed operation; keyed by content, a shrunk run keeps the luck of what is left of it.
"""

MASK = (1 << 64) - 1


def scramble(number: int) -> int:
    """A 64-bit hash of a 64-bit number (the finaliser of SplitMix64, Steele et al. 2014)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def luck(*key: int) -> float:
    """Uniform in [0, 1), by key."""
    number = 0x9E3779B97F4A7C15
    for part in key:
        number = scramble((number + part) & MASK)
    return scramble(number) / (1 << 64)
