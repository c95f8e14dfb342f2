"""Foreign bytes as the multipart body of an upload.

Owns: the request around them.  A first line that begins with ``multipart`` is the body's type.
"""

import asyncio
import warnings
from pathlib import Path
from unittest import mock

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, StreamReader
from aiohttp.test_utils import make_mocked_request

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.extensions.storage.uploads import MULTIPART, received

MOST_BYTES = 4096


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    kind = f"{MULTIPART}; boundary=part"
    if data.startswith(b"multipart"):
        line, _, data = data.partition(b"\n")
        kind = line.decode("utf-8", "replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadContentDispositionHeader)
        warnings.simplefilter("ignore", BadContentDispositionParam)
        asyncio.run(_upload(kind, data, folder / "part"))


async def _upload(kind: str, data: bytes, path: Path) -> None:
    content = StreamReader(mock.Mock(), 1 << 16, loop=asyncio.get_running_loop())
    content.feed_data(data)
    content.feed_eof()
    request = make_mocked_request("POST", "/v1/files", headers={"Content-Type": kind}, payload=content)
    try:
        async with received(request, path, ServerSection(), MOST_BYTES) as upload:
            assert upload.num_bytes is None or upload.num_bytes <= MOST_BYTES
    except RequestError as error:
        if error.status >= 500:
            raise AssertionError(f"the client's fault is said to be ours: {error}") from error
