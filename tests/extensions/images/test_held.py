"""Pictures of open choices: their bytes are bounded until the request has ended, by client and in all."""

import pytest

from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Picture
from server.clients import Clients
from server.http.exchange import Exchange
from tests.server.fake_ingress import FakeIngress

LARGE = (ChatTurn("user", "", pictures=(Picture(bytes(8 << 20), "0", 8, 8),) * 2, places=(0, 0)),)


async def test_a_client_holds_so_many_bytes_of_pictures_until_its_requests_end() -> None:
    clients = Clients(FakeIngress(), ServerSection(max_body_bytes=1 << 20), LimitsSection())
    first, second, other = (clients.request(Exchange("name", address)) for address in ("me", "me", "you"))
    for _ in range(4):
        first.open(LARGE, SamplingParams())
    for one in (first, second):
        with pytest.raises(RequestError, match="pictures of 63 MiB are under way, of 64 MiB at most") as refused:
            one.open(LARGE, SamplingParams())
        assert (refused.value.status, refused.value.code) == (429, "pictures_full")
    first.open("text", SamplingParams())
    other.open(LARGE, SamplingParams())
    first.close()
    second.open(LARGE, SamplingParams())
    second.close()
    other.close()
    assert not clients.pictures.num_bytes
