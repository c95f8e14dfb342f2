"""One finding of ``callboard doctor``."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.  found: what is there.  advice: what to do, unless it is good."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""
