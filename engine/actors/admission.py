"""Whether any request can be taken now, whatever it asks.

Owns: those refusals, and after how long a client may come back.  Does not know: prompts, clients, HTTP.
The server asks before it reads a body, and ingress asks again when the request gets there.
"""

from typing import Protocol

from engine.errors import RequestError

RETRY_AFTER_S = 1  # a queue place can free up with the next step
RETRY_LATER_S = 5  # a model loads, or another server takes over


class Admitting(Protocol):
    """What takes requests: ingress.  num_leaving: cancelled requests that the engine has not let go of.

    ready: the model is loaded.  failure: why the engine died, once it has."""

    ready: bool
    draining: bool
    failure: str | None

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""

    @property
    def num_leaving(self) -> int: ...


def unavailable(ingress: Admitting) -> RequestError | None:
    """Returns why no request can be taken until the engine's state changes, or None."""
    if ingress.failure is not None:
        reason, code = "the engine has stopped", "engine_died"
    elif ingress.draining:
        reason, code = "the server is shutting down", "draining"
    elif not ingress.ready:
        reason, code = "the model is loading", "not_ready"
    else:
        return None
    error = RequestError(reason, status=503, code=code, retry_after_s=RETRY_LATER_S)
    if ingress.failure is not None:
        error.add_note(ingress.failure)  # for callers in Python: a response over HTTP does not tell it
    return error


def check_admission(ingress: Admitting, max_requests: int) -> None:
    """Raise RequestError if no request can be taken: 503 when not serving, 429 when full."""
    if (error := unavailable(ingress)) is not None:
        raise error
    if ingress.num_open + ingress.num_leaving >= max_requests:
        leaving = f", {ingress.num_leaving} cancelled ones are leaving," if ingress.num_leaving else ""
        raise queue_full(f"{ingress.num_open} requests are open{leaving} and no more than {max_requests} are accepted")


def queue_full(reason: str) -> RequestError:
    """The refusal of a request for which there is no room now."""
    return RequestError(f"{reason}; try again later", status=429, code="queue_full", retry_after_s=RETRY_AFTER_S)
