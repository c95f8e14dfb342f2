"""Pictures of other servers: they are fetched from hosts that the operator allows, within limits.

Owns: which addresses are asked, redirects, time.  Does not know: what is in a picture.
The address that was checked is the one that is connected, whatever a second look-up of its name would give.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from server.extensions.images.header import PictureError
from server.extensions.images.hosts import DEFAULT_PORTS, AllowedHost, address_of
from server.extensions.images.lookups import LookUps
from server.extensions.images.places import Places

FETCH_TIMEOUT_S: Final = 10.0
MAX_FETCHES: Final = 8  # at once, of all clients
FETCHES_OF_ONE: Final = 4
MAX_REDIRECTS: Final = 3
MAX_URL_CHARS: Final = 8192
CHUNK_BYTES: Final = 64 << 10
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
HEADERS: Final = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif, video/mp4",
    "Accept-Encoding": "identity",
    "User-Agent": "callboard",
}


class _ForbiddenAddress(OSError):
    """A host has no address that it may have."""


class Media:
    """Fetches pictures.  hosts: entries of ``server.media_hosts``.  resolver: looks names up."""

    def __init__(self, hosts: Sequence[str], resolver: AbstractResolver | None = None) -> None:
        self._hosts = [one for given in hosts if (one := AllowedHost.read(given)) is not None]
        self._resolver = resolver or LookUps()
        self._places = Places(MAX_FETCHES, FETCHES_OF_ONE)

    async def fetch(self, address: str, client: str, count: Callable[[int], None]) -> tuple[bytes, str]:
        """Return a file, and the type that its server says it has.

        count: called with the number of bytes to come, or that came, before they are kept; it raises for too many.
        Raises PictureError for a file that cannot be had, and RequestError where the client's turn does not come."""
        url = _parsed(address)
        first = url
        async with self._places.of(client):
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    for _ in range(MAX_REDIRECTS + 1):
                        answer = await self._get(url, self._allowed(url), count)
                        if not isinstance(answer, URL):
                            return answer
                        if answer.host != first.host:
                            raise PictureError(f"{first.host} redirects to another host; give that address itself")
                        url = answer
            except TimeoutError:
                raise PictureError(f"{url.host} did not send it within {FETCH_TIMEOUT_S:g} s") from None
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, _ForbiddenAddress):
                    raise _private(url) from None
                raise PictureError(f"{url.host} cannot be reached") from None
            except (aiohttp.ClientError, ValueError):
                raise PictureError(f"{url.host} did not send it as HTTP demands") from None
        raise PictureError(f"{url.host} redirects more than {MAX_REDIRECTS} times")

    async def close(self) -> None:
        """End the look-ups of names."""
        await self._resolver.close()

    def _allowed(self, url: URL) -> AllowedHost:
        """Return the entry that allows an address.  Raises PictureError if none does."""
        if not self._hosts:
            raise PictureError(
                "an address, and this server fetches pictures from no host (server.media_hosts); send a data URI"
            )
        host, port = url.host or "", url.port or 0
        covering = [one for one in self._hosts if one.covers(url.scheme, host, port)]
        if not covering:
            raise PictureError(
                f"the host {host[:100]} with port {port} is not among those that pictures may be fetched from "
                "(server.media_hosts); send a data URI"
            )
        # A resolver is not asked for what looks like an address, and the system takes more for one than Python does.
        if address_of(host) is None and (host.replace(".", "").isdigit() or ":" in host or "%" in host):
            raise PictureError(f"the host {host[:100]} is neither a name nor an address in its usual form")
        named = max(covering, key=lambda one: not one.name.startswith("*"))
        if (literal := address_of(host)) is not None and not named.may_be_at(literal):
            raise _private(url)
        return named

    async def _get(self, url: URL, host: AllowedHost, count: Callable[[int], None]) -> tuple[bytes, str] | URL:
        """Return the answer, or where it is."""
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True, socket_factory=partial(_checked, host)
        )
        options: dict[str, Any] = {"cookie_jar": aiohttp.DummyCookieJar(), "auto_decompress": False, "headers": HEADERS}
        async with (
            aiohttp.ClientSession(connector=connector, **options) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status in REDIRECTS and (where := response.headers.get("Location")):
                return _parsed(str(url.join(URL(where))))
            if response.status != 200:
                raise PictureError(f"{url.host} answered with status {response.status}")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise PictureError(f"{url.host} sent it compressed, which was not asked for")
            count(0 if response.content_length is None else response.content_length)
            return await _received(response, count), response.content_type


def _checked(host: AllowedHost, to: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket for an address, which a look-up gave or the URL itself.  Raises _ForbiddenAddress."""
    family, kind, protocol, _, (where, *_) = to
    if (address := address_of(str(where))) is None or not host.may_be_at(address):
        raise _ForbiddenAddress
    return socket.socket(family, kind, protocol)


async def _received(response: aiohttp.ClientResponse, count: Callable[[int], None]) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        body += chunk
        count(len(body))
    return bytes(body)


def _parsed(address: str) -> URL:
    """Return an address.  Raises PictureError for one of another form than http(s)."""
    try:
        url = URL(address) if len(address) <= MAX_URL_CHARS else URL()
        is_web = url.scheme in DEFAULT_PORTS and bool(url.host) and url.port is not None
    except ValueError:
        is_web = False
    if not is_web:
        raise PictureError(
            "neither a data URI nor an address that begins with http:// or https:// and has at most "
            f"{MAX_URL_CHARS} characters"
        )
    if url.user is not None or url.password is not None:
        raise PictureError("an address with a user's name or password, which is not sent on; leave it out")
    return url


def _private(url: URL) -> PictureError:
    return PictureError(
        f"{url.host} leads to an address that is not public; the operator must name it itself in server.media_hosts"
    )
