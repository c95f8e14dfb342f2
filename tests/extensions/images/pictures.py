"""Small pictures of every format, and a server whose model sees."""

import base64
from io import BytesIO
from typing import Any

import msgspec
from PIL import Image

from engine.checkpoints.use import ModelUse
from engine.settings.sections import ServerSection, StorageSection
from server.model_card import ModelCard
from tests.server.fake_ingress import FakeIngress
from tests.server.live_server import CARD, LiveServer

SEEING: ModelCard = msgspec.structs.replace(CARD, use=ModelUse(sees=True))


def seeing(
    ingress: FakeIngress | None = None,
    *,
    server: ServerSection | None = None,
    storage: StorageSection | None = None,
) -> LiveServer:
    """Return a server of a fake engine that says it sees."""
    return LiveServer(ingress, server=server, storage=storage, card=SEEING)


def picture(form: str = "PNG", size: tuple[int, int] = (12, 8), mode: str = "RGB", **options: Any) -> bytes:
    """Return a file; each pixel differs from its neighbours.  options: of Pillow's ``save``."""
    image = Image.new("RGB", size)
    image.putdata([(x * 19 % 256, y * 31 % 256, (x + y) * 7 % 256) for y in range(size[1]) for x in range(size[0])])
    file = BytesIO()
    image.convert(mode).save(file, form, **options)
    return file.getvalue()


def data_uri(data: bytes, media_type: str = "") -> str:
    """Return a file as the text that stands for it in JSON."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
