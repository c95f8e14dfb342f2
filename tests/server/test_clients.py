"""The things of one client: its share of the queue, its cached prefixes, its keys."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from engine.messages import Finish
from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from server.clients import CLIENT, MOST_ENDED, Clients
from server.extensions.pooling.embeddings import EmbeddingBody, Embeddings
from server.generate.generation import MAX_CHOICES, Generation
from server.generate.route import Choices
from server.http.exchange import EXCHANGE, Exchange
from server.openai.translator import Translator
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import CARD, MODEL, LiveServer

HANG = json.dumps({"model": MODEL, "prompt": "!hang", "stream": True}).encode()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def complete(live: LiveServer, key: str = "", **fields: object) -> Reply:
    body = {"model": MODEL, "prompt": "p", "max_tokens": 2, **fields}
    return ask(live.port, "POST", "/v1/completions", body, bearer(key) if key else {})


def test_a_client_has_its_share_of_the_queue_and_others_have_theirs() -> None:
    server, limits = ServerSection(api_key=["one", "two"]), LimitsSection(max_requests_per_client=2)
    with LiveServer(server=server, limits=limits) as live:
        with RawClient(live.port) as first, RawClient(live.port) as second:
            for client in (first, second):
                client.send(http_bytes("POST", "/v1/completions", HANG, bearer("one")))
            assert live.wait_until(lambda: live.ingress.num_open == 2, 2)
            refused = complete(live, "one")
            assert (refused.status, refused.error["code"]) == (429, "client_queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert complete(live, "two").status == 200
        assert live.wait_until(lambda: live.ingress.num_open == 0, 2)
        assert complete(live, "one").status == 200


def test_every_choice_counts_and_a_request_that_is_refused_leaves_none_open() -> None:
    with LiveServer(limits=LimitsSection(max_requests_per_client=3)) as live:
        assert complete(live, n=3).status == 200
        assert complete(live, n=4).status == 429
        assert live.call(lambda: live.ingress.num_open) == 0
        assert complete(live, n=3).status == 200


def rates(reply: Reply) -> dict[str, str]:
    names = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit-")}
    return {name.removeprefix("x-ratelimit-"): value for name, value in names.items()}


def test_an_answer_says_what_is_left_of_the_clients_minute() -> None:
    with LiveServer(limits=LimitsSection(requests_per_minute=2, tokens_per_minute=600)) as live:
        first = rates(complete(live))
        assert (first["limit-requests"], first["remaining-requests"]) == ("2", "1")
        assert (first["limit-tokens"], int(first["remaining-tokens"]) < 600) == ("600", True)
        assert 1 <= int(first["reset-requests"].removesuffix("s")) <= 30
        assert rates(complete(live, stream=True))["remaining-requests"] == "0"
        refused = complete(live)
        assert (refused.status, rates(refused)["remaining-requests"]) == (429, "0")
        assert 30 < int(rates(refused)["reset-requests"].removesuffix("s")) <= 60
    with LiveServer(limits=LimitsSection(requests_per_minute=2)) as live:
        assert set(rates(complete(live))) == {"limit-requests", "remaining-requests", "reset-requests"}
    with LiveServer() as live:
        assert rates(complete(live)) == {}


async def answered(clients: Clients, prompt: str, count: int) -> int:
    """The number of choices that have ended whole, of a request with so many prompts."""

    async def handler(request: web.Request) -> web.Response:
        generation = Generation(prompts=(prompt,) * count, params=SamplingParams(max_tokens=1))
        ended = 0
        async with Choices(request[CLIENT], generation) as choices:
            while (item := await choices.next()) is not None:
                ended += item[1].finish != Finish.RUNNING
        return web.Response(status=ended)

    request = make_mocked_request("POST", "/v1/embeddings")
    request[EXCHANGE] = Exchange.of(request)
    if prompt == "!hang":
        asyncio.get_running_loop().call_later(0.01, clients.abort, None)
    try:
        return (await clients.middleware(request, handler)).status
    finally:
        assert not clients.num_open


async def test_choices_that_follow_take_the_places_of_those_that_have_ended() -> None:
    limits = LimitsSection(max_requests_per_client=MAX_CHOICES)
    assert await answered(Clients(FakeIngress(), ServerSection(), limits), "p", 3 * MAX_CHOICES) == 3 * MAX_CHOICES


async def test_none_follows_those_that_were_aborted() -> None:
    ingress = FakeIngress()
    with pytest.raises(RequestError) as ended:
        await answered(Clients(ingress, ServerSection(), LimitsSection()), "!hang", 2 * MAX_CHOICES)
    assert (ended.value.status, ended.value.code) == (409, "aborted")
    assert len(ingress.asked) == MAX_CHOICES


def salts(api_key: str | Sequence[str], **server: object) -> list[object]:
    """The salts that reach the engine for a request of each key, without and with one of its own."""
    keys = [api_key] if isinstance(api_key, str) else api_key
    with LiveServer(FakeIngress(), server=ServerSection(api_key=api_key, **server)) as live:
        for key in keys:
            assert complete(live, key).status == 200
            assert complete(live, key, cache_salt="own").status == 200
        return [options.cache_salt for _, _, options in live.ingress.asked]


def test_clients_with_different_keys_share_no_cached_prefix() -> None:
    first, first_own, second, second_own = salts(["one", "two"])
    assert len({first, first_own, second, second_own}) == 4
    assert "" not in (first, second)
    assert "one" not in str(first), "a salt is no place for a key"
    assert salts(["one", "two"])[0] == first, "a restart keeps a host tier's worth"


def test_no_client_can_name_another_ones_salt() -> None:
    with LiveServer(FakeIngress(), server=ServerSection(api_key=["one", "two"])) as live:
        complete(live, "one")
        ((_, _, options),) = live.ingress.asked
        complete(live, "two", cache_salt=options.cache_salt)
        assert live.ingress.asked[1][2].cache_salt != options.cache_salt


@pytest.mark.parametrize("server", [{"api_key": "one"}, {"api_key": ["one", "two"], "shared_cache": True}])
def test_with_one_key_or_on_request_the_cache_is_everybodys(server: dict) -> None:
    assert set(salts(**server)) == {"", "own"}


def test_any_of_several_keys_opens_and_nothing_else() -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two", ""])) as live:
        assert [ask(live.port, "GET", "/version", headers=bearer(key)).status for key in ("one", "two")] == [200, 200]
        for key in ("", "three", "on", "onetwo", "one,two"):
            assert ask(live.port, "GET", "/version", headers=bearer(key)).status == 401
        assert ask(live.port, "GET", "/version").status == 401


def tenants(**server: object) -> list[str]:
    """The tenants that a policy sees: of a client without a user, and of one that names a user."""
    with LiveServer(FakeIngress(), server=ServerSection(**server)) as live:  # type: ignore[arg-type]
        for fields in ({}, {"user": "ann"}):
            assert complete(live, "one", **fields).status == 200
        return [options.origin.tenant or options.origin.client for _, _, options in live.ingress.asked]


def test_the_user_of_a_request_without_text_is_its_tenant() -> None:
    generation = Embeddings(Translator(CARD)).translate(EmbeddingBody(input="one", user="ann"))
    assert generation.options.origin.tenant == "ann"


def test_a_tenant_is_a_key_or_else_a_user_or_else_an_address() -> None:
    assert tenants() == ["127.0.0.1", "ann"]
    assert len(set(tenants(api_key=["one", "two"]))) == 1, "a client with a key is no other one by saying so"


def test_a_busy_client_pushes_only_its_own_requests_out_of_those_that_are_explained() -> None:
    clients = Clients(FakeIngress(), ServerSection(), LimitsSection())

    def end(name: str, address: str) -> None:
        one = clients.request(Exchange(name, address))
        one.choices.append((1, 0.0))
        one.close()

    end("first", "bob")
    for number in range(MOST_ENDED + 100):
        end(str(number), "alice")
    for number in range(40):
        end(f"more {number}", f"address {number}")
    known = [one.exchange.id for one in clients.known_to(None)]
    assert len(known) == MOST_ENDED
    assert known[0] == "first"
    assert known[-41:] == [str(MOST_ENDED + 99), *(f"more {number}" for number in range(40))]
