"""The messages between the head and a node.

Owns: their fields.  Does not know: when they are sent.
"""

from engine.types.notices import Message
from engine.workers.child import Ticket


class NodeHere(Message, frozen=True, kw_only=True):
    """The first message of a node.

    facts: what must be the same in all processes, by name.  problem: why this machine cannot run ranks, or empty."""

    facts: dict[str, str]
    problem: str = ""


class NodeLeaving(Message, frozen=True, kw_only=True):
    """A signal has reached the node.  The head answers with ``Farewell``, after its last requests if it ends too."""


class RankEnded(Message, frozen=True, kw_only=True):
    """The process of a rank has ended.  number: as in ``StartRank``.  how: its exit code or signal, as a phrase."""

    number: int
    how: str


class Welcome(Message, frozen=True):
    """The head's answer to a node that fits."""


class StartRank(Message, frozen=True, kw_only=True):
    """An order to start the process of a rank.  number: a name for the process, used once."""

    number: int
    ticket: Ticket


class KillRank(Message, frozen=True, kw_only=True):
    """An order to end a process at once."""

    number: int


class Farewell(Message, frozen=True, kw_only=True):
    """The last message to a node, which ends.

    reason: why the head has failed, or why it refuses the node; empty if all is well."""

    reason: str = ""
    is_refusal: bool = False


FromNode = NodeHere | NodeLeaving | RankEnded
FromHead = Welcome | StartRank | KillRank | Farewell
