"""GET /health_generate: a token is generated, and the answer is whether it came.

Owns: what is asked of the engine, and how long that may take.  Does not know: why it did not come.
It costs a step, so it needs the key like any request; ``/ready`` costs nothing and knows of a stall as well.
"""

import asyncio

from aiohttp import web

from engine.actors.ingress import RETRY_LATER_S
from engine.errors import RequestError
from engine.messages import Finish, RequestOptions
from engine.params import SamplingParams
from server.backend import Stream
from server.clients import CLIENT
from server.http.replies import json_reply

LIMIT_S = 20.0
PROMPT = (0,)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
FIRST = RequestOptions(
    priority=-(1 << 31)
)  # before whatever else waits: the question is whether tokens come, not how long the queue is


class ProbeRoute:
    """Handles the probe."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s

    async def get(self, request: web.Request) -> web.Response:
        """Generate a token.  Raises RequestError: 503 if no token came, 429 if the queue is full."""
        client = request[CLIENT]
        client.check_admission()
        stream = client.open(PROMPT, ONE_TOKEN, FIRST)
        try:
            async with asyncio.timeout(self._limit_s):
                finish = await _end_of(stream)
        except TimeoutError:
            raise RequestError(
                f"no token within {self._limit_s:g} s", status=503, code="stalled", retry_after_s=RETRY_LATER_S
            ) from None
        finally:
            stream.close()
        if finish == Finish.ABORT:
            raise RequestError("the probe was aborted", status=503, code="aborted", retry_after_s=RETRY_LATER_S)
        return json_reply({"status": "ok"})


async def _end_of(stream: Stream) -> Finish:
    while (finish := (await stream.next()).finish) == Finish.RUNNING:
        pass
    return finish
