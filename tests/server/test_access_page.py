"""docs/api.md has every route's access as the code has it: ``python -m tests.server.test_access_page`` writes it."""

import asyncio
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engine.config import Config
from engine.settings.sections import StorageSection
from server.access import Access, routes_of
from server.extensions.replicas.router import routing
from server.http.connection import HttpRunner
from server.http.listener import bind
from tests.extensions.models.test_front import fronted
from tests.extensions.replicas.fake_replica import FakeFleet
from tests.server.live_server import LiveServer

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Access to routes\n"
INTRODUCTION = """
*open* routes need no key, *client* routes a client's or an operator's key, *operator* routes an operator's;
see [operations.md](operations.md#routes-for-operators). Each handler declares its access; there is no default.
A router of replicas has the routes of its replicas, and those below `/replicas`.
`python -m tests.server.test_access_page` writes this table from the code.

| route | access |
|---|---|
"""


def table() -> str:
    """The section, of a server that stores and of a router."""
    with tempfile.TemporaryDirectory() as folder, LiveServer(storage=StorageSection(folder=folder)) as live:
        found = routes_of(live.runner.app)
    found |= {route: kind for route, kind in asyncio.run(routers()).items() if "/replicas" in route[1]}
    methods: dict[tuple[str, Access], list[str]] = {}
    for (method, path), kind in found.items():
        if method != "HEAD":
            methods.setdefault((path, kind), []).append(method.replace("*", "any"))
    lines = [f"| `{' '.join(sorted(them))} {path}` | {kind} |" for (path, kind), them in sorted(methods.items())]
    return INTRODUCTION + "\n".join(lines) + "\n\n"


async def routers() -> dict[tuple[str, str], Access]:
    """Every route of a router."""
    with bind("127.0.0.1", 0) as listener, noted_applications() as apps:
        async with routing(Config(), FakeFleet(1), listener):
            return routes_of(apps[0])


@contextmanager
def noted_applications() -> Iterator[list[web.Application]]:
    """The applications that are served inside of the context."""
    apps: list[web.Application] = []
    init = HttpRunner.__init__

    def noted(self: HttpRunner, app: web.Application, *rest: Any) -> None:
        apps.append(app)
        init(self, app, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpRunner, "__init__", noted)
        yield apps


def test_the_page_has_every_routes_access() -> None:
    text = PAGE.read_text()
    (section,) = re.findall(rf"^{HEADING}(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section == table()


async def test_every_route_of_a_router_declares_its_access() -> None:
    found = await routers()
    assert {path for (_, path), kind in found.items() if kind == "open"} == {"/health", "/ping", "/ready"}
    assert {path for (_, path), kind in found.items() if kind == "operator"} >= {
        "/replicas", "/replicas/restart", "/replicas/{name}/drain", "/metrics", "/stats", "/apply", "/sleep",
    }  # fmt: skip


async def test_every_route_of_several_models_declares_its_access(monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_applications() as apps:
        async with fronted(monkeypatch):
            found = {path for (_, path), kind in routes_of(apps[0]).items() if kind == "operator"}
    assert found >= {
        "/stats",
        "/server_info",
        "/health_generate",
        "/start_profile",
        "/debug/recording",
        "/metrics",
        "/load",
    }


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(HEADING)
    PAGE.write_text(before + HEADING + table() + rest[rest.index("## ") :])
