"""How a simulated run may fail; three kinds, since they are looked for in different places.

SimFailure
├── SimCrash       something raised that nobody asked to
├── SimIncorrect   a wrong token, a page with two owners, a request that ends twice
└── SimStuck       something that never ends
"""


class SimFailure(Exception):
    """A run broke a promise."""


class SimCrash(SimFailure):
    """Something raised that nobody asked to."""


class SimIncorrect(SimFailure):
    """A promise about results or books is broken."""


class SimStuck(SimFailure):
    """Something that was promised to happen does not."""
