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
    """Change the settings, sleep, wake up, or do the operation of a feature.

    number: the answer, an ``Operated``, has the same one.
    text: TOML with the settings, None for the file that the server was started with; the argument of a feature.
    feature: its name.
    dry_run: only report what would change.  level, tags: of sleep, as in ``Changeover.sleep``."""

    what: Literal["apply", "sleep", "wake_up", "feature"]
    number: int = 0
    feature: str = ""
    text: str | None = None
    dry_run: bool = False
    level: Literal[1, 2] = 1
    tags: tuple[str, ...] = ()


class Operated(Message, frozen=True, kw_only=True):
    """The answer to ``Operate``.

    outcome: an ``Outcome`` as JSON, for ``apply``; that of a feature, as it encodes it.
    error: why nothing was done, with the answer's status and code."""

    number: int
    outcome: bytes = b""
    error: str = ""
    status: int = 200
    code: str = ""
