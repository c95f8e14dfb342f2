"""Logs one line per finished request, and at DEBUG one per change of the prefix cache.

Owns: the format of these lines.  Does not know: their destination, which the logging configuration sets.
A line costs the scheduler's loop about 10 us per request, and nothing per token."""

import logging
from collections.abc import Sequence

from engine.kv.events import KVEvent
from engine.plugins.hookspecs import ObserverContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.meter import RequestMetrics

CALLBOARD_PLUGIN = {"api": 1}

log = logging.getLogger(__name__)

HASH_CHARACTERS = 12  # enough to distinguish pages by eye


class RequestLog:
    """An observer that logs finished requests."""

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Log one line per request, times in milliseconds; a dash if the request did not get that far."""
        for one in requests:
            log.info(
                "request=%d finish=%s prompt_tokens=%d output_tokens=%d cached_tokens=%d queue_ms=%s ttft_ms=%s "
                "tpot_ms=%s e2e_ms=%s retractions=%d priority=%d client=%s id=%s",
                one.request_id,
                one.finish.name.lower(),
                one.num_prompt_tokens,
                one.num_output_tokens,
                one.cached_tokens,
                _milliseconds(one.queue_s),
                _milliseconds(one.ttft_s),
                _milliseconds(one.tpot_s),
                _milliseconds(one.e2e_s),
                one.num_retractions,
                one.priority,
                one.client or "-",
                one.client_request_id or "-",
            )


class RequestAndPageLog(RequestLog):
    """An observer that logs changes of the prefix cache as well."""

    @hookimpl
    def callboard_kv_event(self, events: Sequence[KVEvent]) -> None:
        """Log one line per event, with the first and the last of the pages' hashes."""
        for event in events:
            log.debug(
                "kv %s tier=%s pages=%d first=%s last=%s parent=%s",
                event.kind,
                event.tier,
                len(event.hashes),
                *(name.hex()[:HASH_CHARACTERS] for name in (event.hashes[0], event.hashes[-1], event.parent)),
            )


@hookimpl
def callboard_observer(context: ObserverContext) -> RequestLog:
    """Build the observer; takes no options.  Pages are hashed only if the log level is DEBUG at this point."""
    decode_options("observer.log", context.options, Options)
    return RequestAndPageLog() if log.isEnabledFor(logging.DEBUG) else RequestLog()


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
