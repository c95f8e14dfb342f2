"""GET /health, /health_generate, /ready, /version, /server_info, /model_info and /load: for orchestrators and people.

Owns: what they say.  Does not know: how the server comes into these states; the configuration as a whole, which is not
a client's business.
/health is 200 as long as the process can do its work, now or soon; /ready only while it takes requests.
/health_generate generates a token, before all that waits, and answers whether it came: it is an operator's, and one
probe runs at a time, whose answer all that wait share.  /ready costs nothing and knows of a stall as well.
"""

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from engine.actors.admission import RETRY_LATER_S, check_admission, unavailable
from engine.actors.snapshot import Gauges
from engine.checkpoints.use import GENERATING, ModelUse
from engine.messages import Finish, RequestOptions
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from server.backend import Backend, EngineIngress, EngineStream
from server.clients import Clients
from server.generate.generation import MAX_CHOICES
from server.http.operation import operation
from server.http.replies import error_response, json_reply

Status = Literal["ok", "loading", "draining", "recovering", "asleep"]
# Reasons not to be ready that pass.
LIVE: dict[str, Status] = {"not_ready": "loading", "draining": "draining", "asleep": "asleep"}
HEALTH_PATIENCE_S = 10.0  # longer than an engine that loads may be busy
STALLED_AFTER_S = 30.0  # requests and no step completed for so long: clients should go elsewhere
PROBE_LIMIT_S = 20.0
PROBE_PROMPT = (0,)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
FIRST = RequestOptions(
    priority=-(1 << 31)
)  # before whatever else waits: the question is whether tokens come, not how long the queue is


class HealthBody(msgspec.Struct, frozen=True):
    """The engine's state.  What it holds is an operator's to see."""

    status: Status


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model and its limits.

    kv_tokens: how many tokens the KV pool holds; 0 while the model loads.  max_running: most rows of a step."""

    version: str
    model: str
    max_model_len: int
    vocab_size: int
    tool_parser: str
    reasoning_parser: str
    kv_tokens: int
    kv_page_tokens: int
    max_running: int
    max_requests: int
    max_queued_tokens: int
    max_choices: int
    request_timeout_s: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model as SGLang's clients ask for it.  Paths are a server's own business, so the name stands for them."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float | int] | None
    has_image_understanding: bool
    has_audio_understanding: bool = False


class ServerLoad(msgspec.Struct, frozen=True):
    """The number of requests.  server_load: open ones, each choice counted; running, waiting: in the engine."""

    server_load: int
    running: int
    waiting: int


class StatusRoutes:
    """Handles these routes."""

    def __init__(self, backend: Backend, clients: Clients, version: str) -> None:
        self._ingress, self._monitor, self._card = backend.ingress, backend.monitor, backend.card
        self._clients = clients
        self._version = version

    @operation("GET", "/health", "open", "Whether the process can do its work.", answer=HealthBody, polled=True)
    @operation("GET POST", "/ping", "open", polled=True)
    async def health(self, request: web.Request) -> web.Response:
        error = unavailable(self._ingress)
        if error is None or error.code in LIVE:
            await self._monitor.look(patience_s=HEALTH_PATIENCE_S)  # an engine that hangs is not healthy
        if error is None:
            return json_reply(HealthBody("recovering" if self._ingress.recovering else "ok"))
        if error.code not in LIVE:
            return error_response(error)
        return json_reply(HealthBody(LIVE[error.code]))

    @operation("GET", "/ready", "open", polled=True)
    async def ready(self, request: web.Request) -> web.Response:
        error = unavailable(self._ingress)
        if error is None:
            error = trouble(self._ingress, (await self._monitor.look()).gauges)
        if error is not None:
            return error_response(error)
        return json_reply({"status": "ready"})

    @operation("GET", "/version", "client")
    async def version(self, request: web.Request) -> web.Response:
        return json_reply({"version": self._version})

    @operation(
        "GET",
        "/server_info",
        "operator",
        "What is served, and its limits.",
        also=("/get_server_info",),
        answer=ServerInfo,
    )
    async def info(self, request: web.Request) -> web.Response:
        card, limits, gauges = self._card, self._clients.limits, (await self._monitor.look()).gauges
        return json_reply(
            ServerInfo(
                version=self._version,
                model=card.name,
                max_model_len=card.max_model_len,
                vocab_size=card.vocab_size,
                tool_parser=card.tool_parser,
                reasoning_parser=card.reasoning_parser,
                kv_tokens=gauges.page_size * (gauges.pages_free + gauges.pages_cached + gauges.pages_used),
                kv_page_tokens=gauges.page_size,
                max_running=gauges.max_running,
                max_requests=limits.max_requests,
                max_queued_tokens=limits.max_queued_tokens,
                max_choices=MAX_CHOICES,
                request_timeout_s=limits.request_timeout_s,
            )
        )

    @operation(
        "GET",
        "/model_info",
        "client",
        "The served model, as SGLang has it.",
        also=("/get_model_info",),
        answer=ModelInfo,
    )
    async def model(self, request: web.Request) -> web.Response:
        card = self._card
        defaults = card.chat_defaults or None
        return json_reply(
            ModelInfo(
                model_path=card.name,
                tokenizer_path=card.name,
                is_generation="generate" in card.use.tasks,
                preferred_sampling_params=defaults,
                has_image_understanding=card.use.sees,
            )
        )

    @operation("GET", "/load", "operator", "How many requests there are.", answer=ServerLoad, polled=True)
    async def load(self, request: web.Request) -> web.Response:
        gauges = (await self._monitor.look()).gauges
        return json_reply(ServerLoad(self._ingress.num_open, gauges.num_running, gauges.num_waiting))


def trouble(ingress: EngineIngress, gauges: Gauges) -> RequestError | None:
    """Returns why requests would be refused now, or taken and left waiting; None while all is well."""
    if (error := unavailable(ingress)) is not None:
        return error
    if ingress.recovering:
        reason, code = "a part of the engine is being restarted; requests are taken and wait", "recovering"
    elif gauges.stalled_s > STALLED_AFTER_S and not gauges.of_features.get("rows_paused"):
        # Not the time without a token: a long prompt may be many steps on its way to its first one.
        reason, code = f"requests are open and no step has completed for {gauges.stalled_s:.0f} s", "stalled"
    else:
        return None
    return RequestError(reason, status=503, code=code, retry_after_s=RETRY_LATER_S)


class ProbeRoute:
    """Handles the probe, of which one runs at a time.  use: the model's."""

    def __init__(self, clients: Clients, use: ModelUse = GENERATING, limit_s: float = PROBE_LIMIT_S) -> None:
        self._clients = clients
        self._probe: asyncio.Task[Finish] | None = None
        self._params = use.shortest(ONE_TOKEN)
        self._limit_s = limit_s

    @operation("GET", "/health_generate", "operator")
    async def get(self, request: web.Request) -> web.Response:
        """Generate a token, or what the model gives in its place; all that wait for it get the same answer.

        Raises RequestError: 503 if nothing came, 429 if the queue is full."""
        if self._probe is None or self._probe.done():
            check_admission(self._clients.ingress, self._clients.limits)
            stream = self._clients.ingress.open(PROBE_PROMPT, self._params, FIRST)
            self._probe = asyncio.create_task(self._run(stream), name="probe")
        finish = await asyncio.shield(self._probe)
        if finish == Finish.ABORT:
            raise RequestError("the probe was aborted", status=503, code="aborted", retry_after_s=RETRY_LATER_S)
        return json_reply({"status": "ok"})

    async def _run(self, stream: EngineStream) -> Finish:
        """Returns how it has ended.  Raises RequestError (503) if nothing came."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await _end_of(stream)
        except TimeoutError:
            raise RequestError(
                f"no token within {self._limit_s:g} s", status=503, code="stalled", retry_after_s=RETRY_LATER_S
            ) from None
        finally:
            stream.close()


async def _end_of(stream: EngineStream) -> Finish:
    while (finish := (await stream.next()).finish) == Finish.RUNNING:
        pass
    return finish
