"""What a run of the conformance kit found: every failed case by name, not only the first.

Owns: collecting failures and the error that lists them.  Does not know: what is checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_REASON = 600  # characters; a kernel's own error can be pages long


class ConformanceError(AssertionError):
    """At least one case failed.  failures: case -> what was wrong with it."""

    def __init__(self, subject: str, num_cases: int, failures: dict[str, str]) -> None:
        self.failures = failures
        lines = [f"{subject}: {len(failures)} of {num_cases} cases failed"]
        super().__init__("\n  ".join([*lines, *(f"{case}: {reason}" for case, reason in failures.items())]))


class Findings:
    """Runs cases and keeps what went wrong in each."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._num_cases = 0
        self.failures: dict[str, str] = {}

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case.  An assertion or any other exception in the block is its failure, and the next case follows."""
        self._num_cases += 1
        try:
            yield
        except AssertionError as error:
            self.failures[name] = str(error)[:MAX_REASON] or "an assertion without a message"
        except (Exception, SystemExit) as error:
            self.failures[name] = f"raised {type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON]}"

    def conclude(self) -> None:
        """Raise ConformanceError if any case has failed."""
        if self.failures:
            raise ConformanceError(self._subject, self._num_cases, self.failures)
