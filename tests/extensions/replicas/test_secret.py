"""What replicas on other machines hold requests to, and what they are given."""

import hashlib
import sys
from typing import Any

import msgspec
import pytest
from aiohttp import web

from engine.config import Config, build_config
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.extensions.replicas.ray_fleet import (
    LOOPBACK,
    SharedFleet,
    config_of_replicas,
    host_of_replica,
    terms_of,
)
from server.extensions.replicas.secret import HEADER, FleetSecret, require_secret, with_hashed_keys
from server.http.connection import HttpRunner
from server.http.listener import bind, url_of
from server.keys import Keys
from server.proxy.proxy import new_session

KEYED = {"server": {"api_key": ["k" * 16, "l" * 16], "operator_key": "o" * 16}, "placement": {"cluster_key": "c" * 32}}


async def test_a_replica_answers_its_router_alone() -> None:
    secret = FleetSecret()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="served")

    app = web.Application(middlewares=[require_secret(secret.digest)])
    app.router.add_get("/health", answer)
    runner = HttpRunner(app, ServerSection())
    with bind(LOOPBACK, 0) as listener:
        await runner.listen(listener)
        for headers, status in ((secret.headers, 200), ({}, 403), ({HEADER: "x"}, 403), (FleetSecret().headers, 403)):
            async with new_session(headers) as session, session.get(f"{url_of(listener)}/health") as response:
                assert response.status == status
        await runner.cleanup()


def test_what_ray_keeps_has_neither_a_key_nor_the_secret() -> None:
    config = build_config(Config(), KEYED)
    told = config_of_replicas(config)
    for secret in ("k" * 16, "l" * 16, "o" * 16, "c" * 32):
        assert secret.encode() not in told
    secret = FleetSecret()
    assert secret.headers[HEADER] != secret.digest
    assert secret.digest == hashlib.sha256(secret.headers[HEADER].encode()).hexdigest()


def test_a_replica_knows_the_clients_by_the_digests_of_their_keys() -> None:
    config = build_config(Config(), KEYED)
    given = build_config(Config(), msgspec.json.decode(config_of_replicas(config))).server
    here, there = Keys(config.server), Keys(given)
    for key in ("k" * 16, "l" * 16, "o" * 16):
        assert there.find(key.encode()) == here.find(key.encode()) is not None
    assert there.find(given.operator_key.encode()) is None, "a digest is no key"
    assert with_hashed_keys(given) == given


def test_the_address_is_checked_where_the_replica_listens() -> None:
    assert host_of_replica(ServerSection(), LOOPBACK) == LOOPBACK
    assert host_of_replica(ServerSection(api_key="k"), "10.0.0.7") == "10.0.0.7"
    with pytest.raises(ConfigError, match=r"a replica at 10\.0\.0\.7 listens on its network: set server\.api_key"):
        host_of_replica(ServerSection(), "10.0.0.7")


def test_routers_with_one_key_have_one_secret_for_each_fleet() -> None:
    one, same, other = FleetSecret("k" * 32, "a"), FleetSecret("k" * 32, "a"), FleetSecret("k" * 32, "b")
    assert one.headers == same.headers != other.headers
    assert FleetSecret().digest != FleetSecret().digest
    assert "k" * 32 not in str(one.headers)


def test_routers_agree_on_all_settings_but_where_they_listen() -> None:
    given = build_config(Config(), {"server": {"port": 1}})
    same = build_config(Config(), {"server": {"port": 2, "host": "::1"}})
    others = [
        build_config(Config(), {"kv": {"num_pages": 77}}),
        build_config(Config(), {"server": {"api_key": "k" * 32}}),
    ]
    assert terms_of(given, 2, "d") == terms_of(same, 2, "d")
    digests = {terms_of(one, 2, "d") for one in (given, *others)}
    assert len(digests | {terms_of(given, 3, "d"), terms_of(given, 2, "e")}) == 5


class FakeRay:
    """A cluster on which the first replica of a fleet runs already, with other terms."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self

    def nodes(self) -> list[str]:
        return ["one"]

    def cluster_resources(self) -> dict[str, int]:
        return {}

    def remote(self, *args: Any, **named: Any) -> Any:
        return lambda kind: FakeActors()

    def get(self, terms: list[str]) -> list[str]:
        return terms

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed.append(actor.name)


class FakeActors:
    """Makes the actors of such a cluster."""

    name = ""
    given = ""

    def options(self, *, name: str, **named: object) -> "FakeActors":
        made = FakeActors()
        made.name = name
        return made

    def remote(self, *arguments: str) -> Any:
        if arguments:
            self.given = arguments[-1]
            return self
        return "other terms" if self.name == "main-0" else self.given

    @property
    def terms(self) -> "FakeActors":
        return self


def test_a_router_that_a_fleet_refuses_leaves_no_replica_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    config = build_config(Config(), {"placement": {"cluster_key": "c" * 32}})
    with pytest.raises(ConfigError, match="runs with other settings, another number of replicas"):
        SharedFleet(config, 3, "main")
    assert ray.killed == ["main-1", "main-2"], "what it has started ends, and what others use goes on"
