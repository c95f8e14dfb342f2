"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while requests run, as in vLLM.

Owns: their bodies.  Does not know: which adapters there are, files.
"""

import msgspec
from aiohttp import web

from engine.settings.sections import ServerSection
from server.access import access
from server.adapters import Adapters
from server.http.body import BodyReader
from server.http.replies import json_reply
from server.openai.requests import Short

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """lora_path: of a folder, below that of the configuration.  load_inplace: also if the name is taken."""

    lora_name: Short
    lora_path: Short
    load_inplace: bool | None = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """lora_int_id: vLLM's number for it, which is not looked at."""

    lora_name: Short
    lora_int_id: int | None = None


class AdapterAnswer(msgspec.Struct, frozen=True):
    """lora_name: what is served now, or no more."""

    lora_name: str
    success: bool = True


class AdapterRoutes:
    """Handles both."""

    def __init__(self, adapters: Adapters, server: ServerSection) -> None:
        self._adapters = adapters
        self._loading = BodyReader(LoadBody, lambda body: body, server)
        self._unloading = BodyReader(UnloadBody, lambda body: body, server)

    @access("operator")
    async def load(self, request: web.Request) -> web.Response:
        """Serve an adapter from now on.  Raises RequestError: 400 to 415."""
        body = await self._loading.read(request)
        await self._adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
        return json_reply(AdapterAnswer(body.lora_name))

    @access("operator")
    async def unload(self, request: web.Request) -> web.Response:
        """Serve it no more; its open requests go on.  Raises RequestError: 400 to 415."""
        body = await self._unloading.read(request)
        self._adapters.unload(body.lora_name)
        return json_reply(AdapterAnswer(body.lora_name))
