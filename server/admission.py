"""Whether a request is taken at all, decided before its body is read.

Owns: the reasons to say no that do not depend on the request.  Does not know: bodies, prompts; the engine's
ingress decides those, and decides these again when the request gets there.
"""

from engine.errors import RequestError
from engine.sections import LimitsSection
from server.backend import Ingress

RETRY_AFTER_S = 1  # a queue place can free up with the next step
RETRY_LATER_S = 5  # a model loads, or another server takes over


def unavailable(ingress: Ingress) -> RequestError | None:
    """Why the server cannot take any request now, if it cannot."""
    if ingress.failure is not None:
        return RequestError("the engine has stopped", status=503, code="engine_died", retry_after_s=RETRY_LATER_S)
    if ingress.draining:
        return RequestError("the server is shutting down", status=503, code="draining", retry_after_s=RETRY_LATER_S)
    if not ingress.ready:
        return RequestError("the model is loading", status=503, code="not_ready", retry_after_s=RETRY_LATER_S)
    return None


def refuse_early(ingress: Ingress, limits: LimitsSection) -> None:
    """Raise rather than buffer a body that would be refused anyway."""
    if (error := unavailable(ingress)) is not None:
        raise error
    if ingress.num_open >= limits.max_requests:
        raise RequestError(
            f"{ingress.num_open} requests are open, at most {limits.max_requests} are taken",
            status=429,
            code="queue_full",
            retry_after_s=RETRY_AFTER_S,
        )
