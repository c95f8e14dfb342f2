"""Messages about the engine's own state: which parts are ready or lost, gauges, other settings, profiles.

    scheduler and tokenizers ──→ ingress        executors ←─→ scheduler

Owns: ``Message``, the base of every message.  Does not know: requests; their messages are in ``engine/messages.py``.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages: immutable, tagged with its class name, encodable to msgpack."""


class EngineReady(Message, frozen=True, kw_only=True):
    """The engine can serve requests from now on."""


class EngineRecovering(Message, frozen=True, kw_only=True):
    """The executors were lost; requests wait until the next EngineReady.  is_sleep: no new executors are started."""

    reason: str
    is_sleep: bool = False


class ExecutorsReady(Message, frozen=True, kw_only=True):
    """Every executor has loaded the model, and each has at least ``num_pages`` pages (executor group -> scheduler)."""

    num_pages: int


class ExecutorsLost(Message, frozen=True, kw_only=True):
    """All executors are gone, with everything on their devices; new ones are being started (their group -> scheduler).

    is_fault: the executors, or what they ran, failed; False if a step was too large, which may be reported again, or
    if other executors replace them.  is_sleep: new executors start when an operator wakes the engine."""

    reason: str
    is_fault: bool = True
    is_sleep: bool = False


class LossExplained(Message, frozen=True, kw_only=True):
    """The request that caused the last losses was found and has ended (scheduler -> executor group).

    num_losses: losses in a row.  executors_work: whether the executors have completed steps since the last loss; if
    not, the executors themselves may be the cause."""

    num_losses: int
    executors_work: bool


class TokenizersReady(Message, frozen=True, kw_only=True):
    """Every request that may arrive can be assigned to a tokenizer."""


class TokenizersLost(Message, frozen=True, kw_only=True):
    """All tokenizer processes are gone; new requests wait for the next ``TokenizersReady``."""

    reason: str


class Stats(Message, frozen=True, kw_only=True):
    """Gauges of the scheduler, sent when a step has changed them.

    free + cached + used pages make up the whole pool.  step_id: the last step that completed."""

    step_id: int
    running: int
    waiting: int
    pages_free: int
    pages_cached: int
    pages_used: int


class Profile(Message, frozen=True, kw_only=True):
    """Record the next steps for a profiler's viewer; what is being recorded is written first.

    num_steps: then it is written; 0 for no more recording.  folder: where, a file for each rank."""

    num_steps: int
    folder: str


class Reconfigure(Message, frozen=True, kw_only=True):
    """Plan with other settings from now on.

    blueprint: a ``Blueprint`` as msgpack; empty if it stays as it is.
    renews: the next executors get a new planner, which takes over the requests; otherwise the present planner goes on
    with the settings."""

    blueprint: bytes = b""
    renews: bool = False
