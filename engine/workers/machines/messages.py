"""The messages between the head and a node.

Owns: their fields.  Does not know: when they are sent.
"""

from engine.types.notices import Message
from engine.workers.child import Ticket


class NodeHere(Message, frozen=True, kw_only=True):
    """A node's first message.  problem: why its machine cannot run ranks, or empty."""

    facts: dict[str, str]
    problem: str = ""


class NodeLeaving(Message, frozen=True):
    """A signal has reached the node.  ``Farewell`` answers it, after the last requests if the head ends as well."""


class RankEnded(Message, frozen=True, kw_only=True):
    """The process of a rank has ended.  number: as in ``StartRank``.  how: its exit code or signal, in words."""

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
    """The last message to a node.  reason: why the head has failed or refuses it, empty if all is well."""

    reason: str = ""
    is_refusal: bool = False


FromNode = NodeHere | NodeLeaving | RankEnded
FromHead = Welcome | StartRank | KillRank | Farewell
