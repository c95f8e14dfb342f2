"""The explanations' watcher of an engine, and the view that ``/explain`` reads."""

from collections.abc import Callable, Sequence

import msgspec

from engine.features.explain.explanation import Explained, explain
from engine.features.explain.timelines import Timelines
from engine.scheduling.requests import Requests

NAME = "explain"


class Explanations(Timelines):
    """Timelines that also return views.  The argument is a list of request ids, the view a list of ``Explained``."""

    def view(self, argument: bytes, requests: Requests, now: float) -> bytes:
        """Return explanations of the requests that are known.  now: seconds of the planner's clock."""
        found = (explain(requests, self, number, now) for number in msgspec.msgpack.decode(argument, type=list[int]))
        return msgspec.msgpack.encode([one for one in found if one is not None])


def planner_watcher(clock: Callable[[], float]) -> Explanations:
    """Return the watcher of one engine's planners."""
    return Explanations(clock)


def asked_for(request_ids: Sequence[int]) -> dict[str, bytes]:
    """Return the argument for a snapshot's ``views`` that requests explanations of these requests."""
    return {NAME: msgspec.msgpack.encode(list(request_ids))}


def explained_in(views: dict[str, bytes]) -> tuple[Explained, ...]:
    """Return the explanations in the views of a snapshot."""
    return msgspec.msgpack.decode(views[NAME], type=tuple[Explained, ...]) if NAME in views else ()
