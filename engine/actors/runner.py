"""The device half of a rank: the protocols of a runner, and of the steps that it has launched.

Owns: the protocols.  Does not know: torch, threads, what a step computes.
"""

from collections.abc import Callable
from typing import Protocol

from engine.actors.inboxes import FromExecutor
from engine.messages import FeatureRequest, Step, StepDone
from engine.types.notices import Profile

Answer = Callable[[FromExecutor], None]


class PendingStep(Protocol):
    """A launched step.  Its methods are called from any thread, one at a time."""

    def ready(self) -> bool:
        """Return whether ``collect`` would return at once."""
        ...

    def collect(self) -> StepDone:
        """Wait for the device and return the result."""
        ...


class Runner(Protocol):
    """The device side of a step.  Every method is called on the device thread, except ``receive``."""

    num_pages: int

    def launch(self, step: Step) -> PendingStep:
        """Start a step without waiting for it; earlier ones may still run, and be collected meanwhile."""
        ...

    def profile(self, ask: Profile) -> None:
        """Start or stop recording the next steps.  Errors of the profiler are logged and not raised."""

    def receive(self, message: FeatureRequest, answer: Answer) -> None:
        """Handle a message that is not a step.  Called on the event loop; returns at once.

        answer: sends messages to the scheduler, from any thread."""
        raise AssertionError(f"this runner takes no request of {message.feature}")

    def close(self) -> None:
        """Finish all work outside of steps, within limits.  Called after the last step."""

    def leave(self) -> None:
        """Abort the communicator after a failure, so that ranks that wait for this one fail at once too."""
