"""What the engine's parts say of themselves: who is ready, who is lost.

    scheduler and tokenizers ──→ ingress        executors ←─→ scheduler

Owns: what every message is, too.  Does not know: requests; ``engine/messages.py`` has what travels for them.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Immutable, tagged with its class name, encodable to msgpack."""


class EngineReady(Message, frozen=True, kw_only=True):
    """Requests can be served from now on."""


class EngineRecovering(Message, frozen=True, kw_only=True):
    """The executors were lost; requests wait until the next EngineReady and then go on.  is_sleep: no new ones come."""

    reason: str
    is_sleep: bool = False


class ExecutorsReady(Message, frozen=True, kw_only=True):
    """Every executor has loaded the model, and each has at least so many pages (executor group -> scheduler)."""

    num_pages: int


class ExecutorsLost(Message, frozen=True, kw_only=True):
    """Every executor is gone, with all that was on the devices; new ones are on their way (their group -> scheduler).

    is_fault: theirs, or of what they ran; not where a step was only too large, which may be said again later, nor where
    others replace them.  is_sleep: new ones come when an operator says so."""

    reason: str
    is_fault: bool = True
    is_sleep: bool = False


class LossExplained(Message, frozen=True, kw_only=True):
    """The request that brought the last losses is found, and has ended (scheduler -> their group).

    num_losses: in a row.  executors_work: they have completed steps since the last one; if not, it may be they."""

    num_losses: int
    executors_work: bool


class TokenizersReady(Message, frozen=True, kw_only=True):
    """There is a tokenizer for every request that may come."""


class TokenizersLost(Message, frozen=True, kw_only=True):
    """No tokenizer process is left just now; requests that come wait for the next ``TokenizersReady``."""

    reason: str
