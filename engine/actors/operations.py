"""What operators ask of an engine while it runs, as messages, and what its entrance hears of it.

Owns: the shape of them.  Does not know: what is done about them, HTTP.
"""

from typing import Literal

from engine.settings.sections import LimitsSection
from engine.types.notices import Message


class SettingsChanged(Message, frozen=True, kw_only=True):
    """Other limits hold from now on.  about: as in ``Handover``; empty if nothing is new in it."""

    limits: LimitsSection
    about: bytes = b""


class Operate(Message, frozen=True, kw_only=True):
    """Change the settings, sleep, wake up, or write what the scheduler was told lately to a file.

    The answer, an ``Operated``, has the same number.

    text: TOML with the settings, None for the file that the server was started with; the name of the file of a
    recording.  dry_run: only say what would change.  level: of sleep, see ``Changeover.sleep``."""

    what: Literal["apply", "sleep", "wake_up", "record"]
    number: int = 0
    text: str | None = None
    dry_run: bool = False
    level: Literal[1, 2] = 1


class Operated(Message, frozen=True, kw_only=True):
    """outcome: an ``Outcome`` as JSON, of ``apply``.  error: why nothing was done, with the status of the answer."""

    number: int
    outcome: bytes = b""
    error: str = ""
    status: int = 200
