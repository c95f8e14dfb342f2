"""The findings of a series of checks: every failed case by name, not only the first.

Owns: collecting failures, the time limit of a case, the error that lists them.  Does not know: the checks.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.host.timeouts import returns_within

CASE_S = 20.0  # limit of a timed case; each takes well below a second
STDLIB = Path(threading.__file__).parent
MAX_REASON = 600  # characters; a kernel's own error can be pages long


class ConformanceError(AssertionError):
    """The error if at least one case failed.  failures: case -> the reason."""

    def __init__(self, subject: str, num_cases: int, failures: dict[str, str]) -> None:
        self.failures = failures
        lines = [f"{subject}: {len(failures)} of {num_cases} cases failed"]
        super().__init__("\n  ".join([*lines, *(f"{case}: {reason}" for case, reason in failures.items())]))


class Findings:
    """Runs cases and records the failure of each."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._num_cases = 0
        self._hangs = False
        self.failures: dict[str, str] = {}

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one case.  An assertion or any other exception in the block fails it, and the next case follows."""
        self._num_cases += 1
        try:
            yield
        except AssertionError as error:
            self.failures[name] = str(error)[:MAX_REASON] or "an assertion without a message"
        except (Exception, SystemExit) as error:
            self.failures[name] = f"raised {type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON]}"

    def timed(self, name: str, check: Callable[[], object], limit_s: float = CASE_S) -> None:
        """Run one case on a thread of its own: if it hangs it fails, and later cases are not run."""
        if self._hangs:
            return
        with self.case(name):
            self._hangs = not returns_within(limit_s, check, f"case {name}")
            assert not self._hangs, (
                f"not done after {limit_s:g} s, at {_place(f'case {name}')}; later cases were not run"
            )

    def conclude(self) -> None:
        """Raise ConformanceError if any case has failed."""
        if self.failures:
            raise ConformanceError(self._subject, self._num_cases, self.failures)


def _place(thread_name: str) -> str:
    """Return where the youngest thread of that name is: its innermost line outside of the standard library."""
    for thread in reversed(threading.enumerate()):
        frame = sys._current_frames().get(thread.ident or 0) if thread.name == thread_name else None
        if frame is not None:
            stack = traceback.extract_stack(frame)
            last = [one for one in stack if Path(one.filename).parent != STDLIB][-1]
            return f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
    return "its end"
