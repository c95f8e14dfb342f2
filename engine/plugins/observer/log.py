"""Logs one line for each request that has ended, and at DEBUG one for each change of the prefix cache.

Owns: the format of those lines.  Does not know: where they go; that is the logging configuration's.
A line costs the scheduler's loop about 10 us once per request, and nothing per token."""

import logging
from collections.abc import Sequence

from engine.kv.events import KVEvent
from engine.plugins.hookspecs import ObserverContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.scheduling.meter import RequestMetrics

CALLBOARD_PLUGIN = {"api": 1}

log = logging.getLogger(__name__)

HASH_CHARACTERS = 12  # enough to tell pages apart by eye


class RequestLog:
    """What operators read."""

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """One line each, times in milliseconds; a dash where the request did not get that far."""
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
    """What people who look into the cache read as well."""

    @hookimpl
    def callboard_kv_event(self, events: Sequence[KVEvent]) -> None:
        """One line each; of the pages' hashes the first and the last."""
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
    """Takes no options.  Looks at the log level now: pages are hashed only for somebody who reads about them."""
    decode_options("observer.log", context.options, Options)
    return RequestAndPageLog() if log.isEnabledFor(logging.DEBUG) else RequestLog()


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
