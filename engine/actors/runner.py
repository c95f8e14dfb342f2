"""The device half of a rank as an executor uses it: a runner, and the steps that it has launched.

Owns: the protocols.  Does not know: torch, threads, what a step computes.
"""

from collections.abc import Callable
from typing import Protocol

from engine.messages import FromExecutor, Profile, Step, StepDone
from engine.types.notices import Message

Answer = Callable[[FromExecutor], None]


class PendingStep(Protocol):
    """A launched step.  Calls come from any thread, one at a time."""

    def ready(self) -> bool:
        """Return whether ``collect`` would return at once."""
        ...

    def collect(self) -> StepDone:
        """Wait for the device and return the result."""
        ...


class Runner(Protocol):
    """The device half of a step.  Every call comes from the device thread, except ``receive``."""

    num_pages: int

    def launch(self, step: Step) -> PendingStep:
        """Start a step without waiting for it; those before it may still run, and be collected meanwhile."""
        ...

    def profile(self, ask: Profile) -> None:
        """Record the next steps, or no more of them.  A failure to record is logged and has no other effect."""

    def receive(self, message: Message, answer: Answer) -> None:
        """Take a message that is no step.  Called on the event loop; returns at once.

        answer: sends messages to the scheduler, from any thread."""
        raise AssertionError(f"this runner takes no {type(message).__name__}")

    def close(self) -> None:
        """Finish the work beside the steps, within limits.  No step comes after this."""

    def leave(self) -> None:
        """After a failure: give up the communicator, so that ranks that wait for this one fail at once as well."""
