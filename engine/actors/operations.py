"""Messages for operators' commands to a running engine, and their results.

Owns: the form of these messages.  Does not know: how they are executed, HTTP.
"""

from typing import Literal

from engine.settings.sections import LimitsSection
from engine.types.notices import Message


class SettingsChanged(Message, frozen=True, kw_only=True):
    """New limits hold from now on.  about: as in ``Handover``; empty if it has not changed."""

    limits: LimitsSection
    about: bytes = b""


class Operate(Message, frozen=True, kw_only=True):
    """Change the settings, sleep, wake up, or write a recording of the scheduler's recent messages to a file.

    number: the answer, an ``Operated``, has the same one.
    text: TOML with the settings, None for the file that the server was started with; the file name of a recording.
    dry_run: only report what would change.  level: of sleep, as in ``Changeover.sleep``."""

    what: Literal["apply", "sleep", "wake_up", "record"]
    number: int = 0
    text: str | None = None
    dry_run: bool = False
    level: Literal[1, 2] = 1


class Operated(Message, frozen=True, kw_only=True):
    """The answer to ``Operate``.

    outcome: an ``Outcome`` as JSON, for ``apply``.  error: why nothing was done, with the status of the answer."""

    number: int
    outcome: bytes = b""
    error: str = ""
    status: int = 200
