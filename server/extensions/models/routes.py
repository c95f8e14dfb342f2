"""The routes of a server of several models: which model a request is for, and what is said of all of them.

Owns: the request's way to its model, what a client may have open at all of them together.
Does not know: how a model is loaded, what requests say beside the model's name.
A GET never loads a model and does not count as its use, so a client that only looks keeps none in memory.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from msgspec import UNSET
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.actors.admission import RETRY_LATER_S, Load, not_serving
from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from server.clients import Charge, Rates
from server.extensions.models.model import ModelReplica
from server.extensions.models.models import Models
from server.http.body import check_headers, collect, name_field
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.replies import json_reply
from server.openai.answers import ModelBody, model_list
from server.proxy.proxy import MOST_LOSSES, Proxy
from server.proxy.replica import unavailable

LOST = "model_lost"  # as ``ModelReplica.choose`` says it


class _Named(msgspec.Struct):
    """The part of a body that is read here."""

    model: str | None = None


class ModelsRoutes:
    """Handles what the front answers, and sends on what it does not.

    proxies: by the model's name.  patience_s: how long a request waits for a load.
    is_leaving: no request is taken any more.  started: the models of the start are loaded, as far as they could be."""

    def __init__(
        self,
        server: ServerSection,
        limits: LimitsSection,
        models: Models,
        proxies: Mapping[str, Proxy],
        rates: Rates,
        patience_s: float,
    ) -> None:
        self.is_leaving = False
        self.started = False
        self._server = server
        self._limits = limits
        self._patience_s = patience_s
        self._models = models
        self._proxies = proxies
        self._rates = rates
        self._created = int(time.time())
        self._num_open: Counter[str] = Counter()

    # ---- for one model ----------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Send on what costs tokens, once its model is loaded.  Raises RequestError: 400, 404, 429 or 503."""
        self._check_admission()
        self._rates.check(request[EXCHANGE].client)
        return await self._send(request, counted=True)

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Send on any other request that a model does something for.  Raises RequestError as ``generate`` does."""
        self._check_admission()
        return await self._send(request, counted=False)

    async def look(self, request: web.Request) -> web.StreamResponse:
        """Send a GET on to the model of ``?model=``, or else to the first that is loaded.

        Raises RequestError: 404, or 503 if it is not loaded."""
        models = self._models
        if (name := request.query.get("model")) is not None:
            model = models.find(name)
        else:
            model = next((one for one in models.all if one.is_ready), models.all[0])
        if not model.is_ready:
            raise RequestError(
                f"the model '{model.name}' is not loaded; a request that generates loads it",
                status=503,
                code="model_not_loaded",
                retry_after_s=RETRY_LATER_S,
            )
        return await self._proxies[model.name].send_on(request, b"")

    async def _send(self, request: web.Request, *, counted: bool) -> web.StreamResponse:
        # As the model's own server would: a page of another site shall load none either.
        if request.can_read_body:
            check_headers(request)
        else:
            refuse_foreign_page(request)
        with self._share_of(request[EXCHANGE].client):
            body = await collect(request, self._server)
            model = self._models.find(_model_of(body) or request.query.get("model"))
            proxy = self._proxies[model.name]
            with self._models.wanted(model):
                charge: Charge | None = None
                for _ in range(MOST_LOSSES):
                    await self._models.loaded(model, self._patience_s)
                    try:
                        if not counted:
                            return await proxy.send_on(request, body)
                        charge = charge or self._rates.admit(request[EXCHANGE].client)
                        return await proxy.send_counted(request, body, charge)
                    except RequestError as error:
                        if error.code != LOST:
                            raise
                # It may be what ends the process.
                raise unavailable(f"the model '{model.name}' was lost {MOST_LOSSES} times with this request", LOST)

    def _check_admission(self) -> None:
        if self.is_leaving:
            raise not_serving("draining")
        Load(self._num_open.total()).check(self._limits)

    @contextmanager
    def _share_of(self, client: str) -> Iterator[None]:
        """Count a request as open.  Raises RequestError (429) if the client has as many as it may."""
        Load(num_of_client=self._num_open[client]).check(self._limits)
        self._num_open[client] += 1
        try:
            yield
        finally:
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]

    # ---- of all models ----------------------------------------------------------------------

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_reply(model_list([self._body(one) for one in self._models.all]))

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}.  Raises RequestError (404)."""
        return json_reply(self._body(self._models.find(request.match_info["id"])))

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: that the front answers, and the models' states."""
        states = {one.name: one.state.value for one in self._models.all}
        return json_reply({"status": "draining" if self.is_leaving else "ok", "models": states})

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: whether requests are taken, and the models of the start are loaded."""
        if self.is_leaving or not self.started:
            raise not_serving("draining" if self.is_leaving else "not_ready")
        return json_reply({"status": "ready"})

    def _body(self, model: ModelReplica) -> ModelBody:
        card = model.card
        return ModelBody(
            id=model.name,
            display_name=model.name,
            created=self._created,
            created_at=datetime.fromtimestamp(self._created, UTC),
            max_model_len=UNSET if card is None else card.max_model_len,
            kind=UNSET if card is None else card.use.kind,
            root=model.name,
            loaded=model.is_ready,
        )


def _model_of(body: bytes) -> str | None:
    """The model that a body names.  Raises RequestError (400) for what is no object of JSON."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.ValidationError as error:
        message, param = name_field(str(error))
        raise RequestError(message, param=param) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="malformed_json") from None


def counts(models: Models) -> Iterator[Metric]:
    """Give the front's samples of each model, for /metrics."""
    loaded = GaugeMetricFamily("callboard_models_loaded", "Whether it takes requests now.", labels=["model"])
    wanted = GaugeMetricFamily("callboard_models_requests", "Open, or waiting for the load.", labels=["model"])
    taken = GaugeMetricFamily("callboard_models_memory_bytes", "What it takes while loaded.", labels=["model"])
    took = GaugeMetricFamily("callboard_models_load_seconds", "How long the last load took.", labels=["model"])
    loads = CounterMetricFamily("callboard_models_loads", "How often it was loaded.", labels=["model"])
    failed = CounterMetricFamily("callboard_models_load_failures", "How often it could not be.", labels=["model"])
    lost = CounterMetricFamily("callboard_models_losses", "How often its process died.", labels=["model"])
    for one in models.all:
        loaded.add_metric([one.name], one.is_ready)
        wanted.add_metric([one.name], one.num_wanted)
        taken.add_metric([one.name], one.loaded_bytes)
        took.add_metric([one.name], one.load_s)
        loads.add_metric([one.name], one.num_loads)
        failed.add_metric([one.name], one.num_failures)
        lost.add_metric([one.name], one.num_lost)
    yield from (loaded, wanted, taken, took, loads, failed, lost)
