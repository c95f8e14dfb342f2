"""Pictures of requests as a part of the server."""

import logging
from collections.abc import AsyncIterator
from importlib.util import find_spec

from aiohttp import web

from server.extensions.images.decoders import Decoders
from server.extensions.images.media import Media
from server.extensions.images.settings import MediaSettings
from server.extensions.images.sight import MISSING, PictureSight
from server.extensions.storage.store import STORE
from server.run.extension import Extension, ServerParts

log = logging.getLogger(__name__)


class ImagesExtension(Extension):
    """Pictures in conversations, where the model sees."""

    def join(self, parts: ServerParts) -> None:
        if not parts.translator.card.use.sees:
            return
        if find_spec("PIL") is None:
            log.warning("images: %s", MISSING)
        decoders = Decoders()
        media = Media(MediaSettings.read(parts.server).media_hosts)
        sight = PictureSight(decoders, media, parts.app.get(STORE), parts.server)
        parts.translator.sight = sight
        for route in parts.served.values():
            route.sight = sight

        async def live(app: web.Application) -> AsyncIterator[None]:
            yield
            await decoders.close()
            await media.close()

        parts.app.cleanup_ctx.append(live)


EXTENSION = ImagesExtension()
