"""How long a test waits for what must come: long enough on any machine, however busy it is.

Most bounds in tests say that something happens at all.  They are far, and cost nothing as long as it does happen; how
soon it happens is for figures (``tests/figures.py``), which follow the machine's load as well.  What has to compare
durations with each other does so at several paces.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

LEAST_S = 60.0
FACTOR = 10.0
PACES = (1.0, 3.0, 9.0)


def crowding() -> float:
    """How many processes want each core, by the last minute; 1 on a machine with nothing else to do."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def far(seconds: float) -> float:
    """A bound for what takes at most ``seconds`` on an idle machine."""
    return max(LEAST_S, FACTOR * seconds) * crowding()


def at_some_pace(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose argument ``pace`` multiplies all of its times: it holds if it does so at one of three paces.

    For what compares durations, such as "a header is cut at its deadline, and not before".  A process that does not run
    for a second spoils that where the deadline is half a second, and hardly where it is nine times as long; a product
    that is wrong is so at every pace.
    """
    signature = inspect.signature(test)

    @functools.wraps(test)
    def paced(**fixtures: Any) -> None:
        for pace in PACES:
            try:
                return test(**fixtures, pace=pace)
            except (AssertionError, OSError):  # a connection may be cut or a time be up
                if pace == PACES[-1]:
                    raise

    kept = [one for name, one in signature.parameters.items() if name != "pace"]
    paced.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return paced
