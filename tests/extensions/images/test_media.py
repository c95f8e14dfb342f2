"""Fetched pictures: from allowed hosts alone, at the address that was checked, within limits of bytes and time."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from engine.config import Config, build_config
from engine.types.errors import ConfigError
from server.extensions.images import media
from server.extensions.images.header import PictureError
from server.extensions.images.hosts import AllowedHost
from server.extensions.images.media import Media
from tests.extensions.images.pictures import picture

PNG = picture()


class Names(AbstractResolver):
    """A resolver that gives other addresses each time it is asked for a name.  asked: how often."""

    def __init__(self, *answers: str) -> None:
        self._answers = answers
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        one = {"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [ResolveResult(**one)]  # type: ignore[typeddict-item]

    async def close(self) -> None: ...


@asynccontextmanager
async def serving(handler: Callable[[web.Request], object]) -> AsyncIterator[int]:
    """A server of pictures; gives its port."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = handler(request)  # type: ignore[arg-type]
        return answer if isinstance(answer, web.StreamResponse) else await answer  # type: ignore[misc]

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


def send(_: web.Request) -> web.Response:
    return web.Response(body=PNG, content_type="image/png")


def free(num_bytes: int) -> None:
    """Count nothing."""


async def refused(made: Media, address: str, count: Callable[[int], None] = free) -> str:
    with pytest.raises(PictureError) as error:
        await made.fetch(address, "me", count)
    return str(error.value)


async def test_a_picture_comes_from_a_host_that_is_named() -> None:
    async with serving(send) as port:
        names = Names("127.0.0.1")
        made = Media([f"pictures.test:{port}"], names)
        assert await made.fetch(f"http://pictures.test:{port}/a.png", "me", free) == (PNG, "image/png")
        literal = Media([f"127.0.0.1:{port}"])
        assert await literal.fetch(f"http://127.0.0.1:{port}/a.png", "me", free) == (PNG, "image/png")
        for address in (f"http://other.test:{port}/", "http://pictures.test/", "https://pictures.test/"):
            assert "not among those that pictures may be fetched from" in await refused(made, address)
        assert names.asked == 1


async def test_the_address_that_was_checked_is_the_one_that_is_connected() -> None:
    async with serving(send) as port:
        names = Names("127.0.0.1", "93.184.216.34")  # a second look-up would lead elsewhere
        made = Media([f"pictures.test:{port}"], names)
        await made.fetch(f"http://pictures.test:{port}/", "me", free)
        assert names.asked == 1
        for address in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0"):
            lured = Media([f"*.test:{port}"], Names(address))
            assert "not public" in await refused(lured, f"http://pictures.test:{port}/")


async def test_no_spelling_of_an_address_is_taken_for_a_public_one() -> None:
    spellings = (
        "2130706433",
        "0177.0.0.1",
        "127.1",
        "0x7f.0.0.1",
        "127.0.0.1.",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::1%25]",
        "[::ffff:127.0.0.1%25]",
        "[::1%250]",
        "[::00001]",
        "[::ffff:127.0.0.01]",
        "[::ffff:127.1]",
        "①②⑦.0.0.1",
    )
    async with serving(send) as port:
        made = Media([f"*:{port}"])
        for host in (*spellings, "localhost", "127。0。0。1"):
            said = await refused(made, f"http://{host}:{port}/")
            assert "not public" in said or "neither a name nor an address" in said, host


async def test_redirects_stay_on_their_host() -> None:
    def redirect(request: web.Request) -> web.Response:
        if request.path == "/there":
            return send(request)
        where = {"/here": "/there", "/away": "http://169.254.169.254/secret", "/round": "/round"}[request.path]
        return web.Response(status=302, headers={"Location": where})

    async with serving(redirect) as port:
        made = Media([f"a.test:{port}", "169.254.169.254"], Names("127.0.0.1"))
        assert (await made.fetch(f"http://a.test:{port}/here", "me", free))[0] == PNG
        assert "redirects to another host" in await refused(made, f"http://a.test:{port}/away")
        assert "redirects more than 3 times" in await refused(made, f"http://a.test:{port}/round")


async def test_limits_of_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(num_bytes: int) -> None:
        if num_bytes > 1000:
            raise PictureError(f"{num_bytes} bytes")

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(500))

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async with serving(endless) as port:
        assert "bytes" in await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/", stop)
    async with serving(lambda _: web.Response(body=bytes(2000))) as port:
        assert await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/", stop) == "2000 bytes"
    monkeypatch.setattr(media, "FETCH_TIMEOUT_S", 0.1)
    async with serving(hang) as port:
        assert "within 0.1 s" in await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/")


def test_a_slow_name_server_keeps_no_other_work_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def hang(*_: object, **__: object) -> None:
        ended.wait(5)
        raise socket.gaierror

    async def work_beside() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        fetching = asyncio.create_task(refused(Media(["*"]), "http://slow.test/"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(2):
            await asyncio.to_thread(ended.set)
            assert "cannot be reached" in await fetching

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop has a look-up of its own
        runner.run(work_beside())


async def test_what_servers_may_answer_with() -> None:
    async with serving(lambda _: web.Response(status=404)) as port:
        assert "status 404" in await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/")
    async with serving(lambda _: web.Response(body=b"x", headers={"Content-Encoding": "gzip"})) as port:
        assert "compressed" in await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/")
    assert "cannot be reached" in await refused(Media([f"127.0.0.1:{port}"]), f"http://127.0.0.1:{port}/")
    assert "user's name" in await refused(Media(["a.test"]), "http://me:secret@a.test/")


@pytest.mark.parametrize(
    ("entry", "address", "may"),
    [
        ("*", "93.184.216.34", True),
        ("*", "10.1.2.3", False),
        ("*", "::ffff:10.1.2.3", False),
        ("*", "64:ff9b::a9fe:a9fe", False),
        ("*", "2002:7f00:1::", False),
        ("*", "fec0::1", False),
        ("*", "64:ff9b:1::a00:1", False),
        ("*", "::ffff:0:a00:1", False),
        ("*", "::a00:1", False),
        ("*", "192.0.0.192", False),
        ("*", "::ffff:192.0.0.192", False),
        ("*", "64:ff9b::808:808", True),
        ("*", "2606:4700::1111", True),
        ("a.test", "93.184.216.34", True),
        ("a.test", "fd00::1", True),
        ("a.test", "fd00:ec2::254", False),
        ("[fd00:ec2::254]", "fd00:ec2::254", True),
        ("*.test", "fd00::1", False),
        ("a.test", "10.1.2.3", True),
        ("a.test", "127.0.0.1", True),
        ("a.test", "169.254.169.254", False),
        ("a.test", "fe80::1", False),
        ("a.test", "0.0.0.0", False),
        ("169.254.169.254", "169.254.169.254", True),
        ("[fe80::1]", "fe80::1", True),
    ],
)
def test_addresses_that_a_host_may_have(entry: str, address: str, may: bool) -> None:
    host = AllowedHost.read(entry)
    assert host is not None
    assert host.may_be_at(ipaddress.ip_address(address)) is may


@pytest.mark.parametrize("given", ["http://a.test", "a.test/x", "a.*", "", "a.test:0", "a.test:99999", "[a]"])
def test_a_setting_that_is_no_host_ends_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.media_hosts"):
        build_config(Config(), {"server": {"media_hosts": [given]}})
