"""How long a test waits for what must come: long enough on any machine, however busy it is.

Most bounds in tests say that something happens at all.  They are far, and cost nothing as long as it does happen; how
soon it happens is for figures (``tests/figures.py``), which follow the machine's load as well.
"""

import os

LEAST_S = 60.0
FACTOR = 10.0


def crowding() -> float:
    """How many processes want each core, by the last minute; 1 on a machine with nothing else to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def far(seconds: float) -> float:
    """A bound for what takes at most ``seconds`` on an idle machine."""
    return max(LEAST_S, FACTOR * seconds) * crowding()
