"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while requests run, as in vLLM.

Owns: their bodies.  Does not know: which adapters there are, files.
"""

import msgspec
from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.extensions.adapters.adapters import Adapters
from server.http.body import BodyReader
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.requests import Short


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to serve.

    lora_path: of a folder, below that of the configuration.  load_inplace: also if the name is taken."""

    lora_name: Short
    lora_path: Short
    load_inplace: bool | None = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to drop.  lora_int_id: vLLM's number for it, which is not looked at."""

    lora_name: Short
    lora_int_id: int | None = None


class AdapterAnswer(msgspec.Struct, frozen=True):
    """The outcome.  lora_name: what is served now, or no more."""

    lora_name: str
    success: bool = True


async def refuse_adapters(request: web.Request) -> web.StreamResponse:
    """Refuse an adapter where several engines are served.  Raises RequestError: 404."""
    raise RequestError("adapters are of one model, and this server has several", status=404, code="adapters_off")


async def refuse_at_start(request: web.Request) -> web.StreamResponse:
    """Raise RequestError (400): a name that one replica knows alone would be there for some requests only."""
    reason = "replicas serve the adapters that they find in lora.folder as they start: put it there, then restart them"
    raise RequestError(f"{reason} (POST /replicas/restart)", code="adapters_at_start")


class AdapterRoutes:
    """Handles both."""

    def __init__(self, adapters: Adapters, server: ServerSection) -> None:
        self._adapters = adapters
        self._loading = BodyReader(LoadBody, lambda body: body, server)
        self._unloading = BodyReader(UnloadBody, lambda body: body, server)

    @operation(
        "POST",
        "/v1/load_lora_adapter",
        "operator",
        "Serve an adapter.",
        answer=AdapterAnswer,
        body=LoadBody,
        off=refuse_adapters,
        replicated=refuse_at_start,
    )
    async def load(self, request: web.Request) -> web.Response:
        """Serve an adapter from now on.  Raises RequestError: 400 to 415."""
        body = await self._loading.read(request)
        await self._adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
        return json_reply(AdapterAnswer(body.lora_name))

    @operation(
        "POST",
        "/v1/unload_lora_adapter",
        "operator",
        "Serve an adapter no more.",
        answer=AdapterAnswer,
        body=UnloadBody,
        off=refuse_adapters,
        replicated=refuse_at_start,
    )
    async def unload(self, request: web.Request) -> web.Response:
        """Serve it no more; its open requests go on.  Raises RequestError: 400 to 415."""
        body = await self._unloading.read(request)
        self._adapters.unload(body.lora_name)
        return json_reply(AdapterAnswer(body.lora_name))
