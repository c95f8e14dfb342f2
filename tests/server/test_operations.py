"""The declaration of a route holds for the route that is served: its access, its methods, and what is off."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.settings.sections import ServerSection
from server.http.operation import Operation, canonical, declared_by, operation
from server.http.routes import Routes
from server.run.core import all_parts
from server.run.extension import declared
from tests.server.http_client import ask
from tests.server.live_server import LiveServer

KEYS = """
[clients]
ann = "ann's key, which is long enough"
[operators]
ops = "the operators' key, long enough"
"""
OPERATIONS = declared(all_parts())


def test_an_operation_needs_the_key_that_it_declares(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(KEYS)
    client = {"Authorization": "Bearer ann's key, which is long enough"}
    routes = [(one, re.sub(r"\{[^}]*\}", "x", path)) for one in OPERATIONS for path in one.paths]
    # Side by side: the server answers wrong keys late.
    with LiveServer(server=ServerSection(key_file=str(file))) as live, ThreadPoolExecutor(16) as threads:
        without = threads.map(lambda route: ask(live.port, route[0].methods[0], route[1]).status, routes)
        for (one, path), status in zip(routes, without, strict=True):
            assert (status == 401) == (one.access != "open"), path
            refused = ask(live.port, one.methods[0], path, headers=client).status == 403
            assert refused == (one.access == "operator"), path


def test_every_path_is_declared_once() -> None:
    named = [(method, canonical(path)) for one in OPERATIONS for path in one.paths for method in one.methods]
    assert len(named) == len(set(named))


def test_access_has_no_default() -> None:
    with pytest.raises(TypeError, match="access"):
        Operation("GET", "/x")  # type: ignore[call-arg]


class Two:
    """Handlers of two routes, one of them under two methods."""

    @operation("GET", "/a/{id:.+}", "client")
    async def look(self, request: object) -> None: ...

    @operation("POST GET", "/b", "operator", also=("/c",))
    async def act(self, request: object) -> None: ...


def test_handlers_carry_what_is_declared_of_them() -> None:
    assert [(name, one.name) for name, one in declared_by(Two)] == [("look", "/a/{id}"), ("act", "/b")]
    routes = Routes()
    routes.add(Two())
    found = {(one.method, one.path) for one in routes.definitions()}
    look = {("GET", "/a/{id:.+}"), ("HEAD", "/a/{id:.+}")}
    assert found == look | {(method, path) for method in ("POST", "GET") for path in ("/b", "/c")}
    assert routes.named["GET", "/c"].access == "operator"
    assert ("HEAD", "/c") not in routes.named, "a GET that acts has no HEAD"


def test_another_handler_answers_in_place_of_the_one_that_declares() -> None:
    routes, two = Routes(), Two()
    routes.add(two)
    routes.replace(Two.act, two.look)
    assert {one.handler for one in routes.definitions() if one.path == "/b"} == {two.look}
