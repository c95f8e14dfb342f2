"""The failures of a simulated run; three kinds, since each is looked for in another place.

SimFailure
├── SimCrash       an exception that no operation planted
├── SimIncorrect   a wrong token, a page with two owners, a request that ends twice
└── SimStuck       something that never ends
"""


class SimFailure(Exception):
    """A run broke a promise."""


class SimCrash(SimFailure):
    """An exception that no operation planted."""


class SimIncorrect(SimFailure):
    """A promise about results or books is broken."""


class SimStuck(SimFailure):
    """Something that was promised to happen does not."""
