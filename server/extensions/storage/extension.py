"""The store of files as a part of the server."""

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from engine.config import Config
from engine.types.errors import RequestError
from server.extensions.storage.files import HOUR_S, Files
from server.extensions.storage.pace import PACE, Pace
from server.extensions.storage.routes import BATCH, VISION, FileRoutes
from server.extensions.storage.store import STORE, Store, check_storage
from server.run.extension import Extension, ServerParts

log = logging.getLogger(__name__)


class StorageExtension(Extension):
    """/v1/files, where storage.folder is set; and the store, for other parts."""

    handlers = (FileRoutes,)

    def check(self, config: Config, engines: str = "") -> None:
        if not engines:  # replicas and several models store nothing
            check_storage(config.storage)

    def join(self, parts: ServerParts) -> None:
        if not parts.storage.folder:
            return
        store = parts.app[STORE] = Store(parts.storage)
        parts.app[PACE] = Pace(parts.backend, parts.clients)
        purposes = VISION if parts.translator.card.use.sees else BATCH
        parts.routes.add(FileRoutes(store, parts.server, purposes))

        async def live(app: web.Application) -> AsyncIterator[None]:
            sweeping = asyncio.create_task(_sweep(Files(store)), name="storage-sweep")
            yield
            sweeping.cancel()
            await asyncio.to_thread(store.close)

        parts.app.cleanup_ctx.append(live)


async def _sweep(files: Files) -> None:
    while True:
        try:
            await files.sweep()
        except RequestError as error:
            log.error("storage: what has expired is still there, and goes within an hour if it can: %s", error)
        await asyncio.sleep(HOUR_S)


EXTENSION = StorageExtension()
