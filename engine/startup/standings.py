"""The results of a race of attention backends: each one's times, or why it is out, and the choice.

Owns: the choice, and how results are shown.  Does not know: what was run, where results are kept.
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engine.plugins.selection import Contender

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger(__name__)

AS_FAST = 1.03  # within this of the fastest the order of preference decides: times vary that much by themselves


class RaceResult(msgspec.Struct, frozen=True):
    """A contender's result in one phase.  us: load -> microseconds of all layers.  problem: why it is out, or ''.
    late: whether only time was lacking, so that the next start tries again.  tries: number of starts so far."""

    name: str
    options: dict[str, Any]
    us: dict[str, float]
    problem: str = ""
    late: bool = False
    tries: int = 1

    @property
    def contender(self) -> Contender:
        """The contender that was measured."""
        return Contender(self.name, self.options)


class RaceReport(msgspec.Struct, frozen=True):
    """The results of a race: phase -> results, in the order of preference.  about: what they hold for."""

    about: str
    results: dict[str, list[RaceResult]]

    def by_contender(self) -> dict[tuple[str, str], RaceResult]:
        """Return the results by phase and contender, as its text."""
        return {(phase, str(one.contender)): one for phase, results in self.results.items() for one in results}

    def fastest(self) -> dict[str, Contender]:
        """Return phase -> the contender with the least geometric mean; a preferred one that is as fast comes first."""
        found: dict[str, Contender] = {}
        for phase, results in self.results.items():
            right = [(one, _mean(one.us.values())) for one in results if not one.problem]
            if right:
                limit = AS_FAST * min(mean for _, mean in right)
                found[phase] = next(one.contender for one, mean in right if mean <= limit)
        return found

    def table(self) -> "Table":
        """Return the results as a table for a terminal."""
        from rich.table import Table  # a start shows none

        table = Table("phase", "attention", "", "us of a step's layers", title=self.about, title_justify="left")
        fastest = self.fastest()
        for phase, results in self.results.items():
            for one in results:
                mark = "fastest" if fastest.get(phase) == one.contender else ""
                table.add_row(phase, str(one.contender), mark, one.problem or _spell(one.us))
        return table

    def log_all(self) -> None:
        """Log the results."""
        for phase, results in self.results.items():
            for one in results:
                log.info("attention race, %s: %s: %s", phase, one.contender, one.problem or _spell(one.us))
        for phase, contender in self.fastest().items():
            log.info("attention race, %s: %s is the fastest (%s)", phase, contender, self.about)


def _mean(values: Collection[float]) -> float:
    logs = [math.log(max(value, 1e-9)) for value in values]
    return math.exp(sum(logs) / len(logs))


def _spell(us: Mapping[str, float]) -> str:
    return "; ".join(f"{load}: {value:.4g}" for load, value in us.items())
