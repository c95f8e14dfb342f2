"""Pictures of open choices: their bytes are bounded until the request has ended, by client and in all."""

import msgspec
import pytest

from engine.settings.sections import LimitsSection, ServerSection
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn, Picture
from server.clients import Clients
from server.http.exchange import Exchange
from tests.server.fake_ingress import FakeIngress


def large(number: int) -> tuple[ChatTurn, ...]:
    """A conversation with two pictures of 8 MiB that no other one has."""
    pictures = tuple(Picture(bytes(8 << 20), f"{number} {one}", 8, 8) for one in range(2))
    return (ChatTurn("user", "", pictures=pictures, places=(0, 0)),)


async def test_a_client_holds_so_many_bytes_of_pictures_until_its_requests_end() -> None:
    clients = Clients(FakeIngress(), ServerSection(max_body_bytes=1 << 20), LimitsSection())
    mine = [clients.request(Exchange("name", "me")) for _ in range(5)]
    other = clients.request(Exchange("name", "you"))
    for number, one in enumerate(mine[:4]):
        one.open(large(number), SamplingParams())
    for one in (mine[0], mine[4]):
        with pytest.raises(RequestError, match="pictures of 63 MiB are under way, of 64 MiB at most") as refused:
            one.open(large(4), SamplingParams())
        assert (refused.value.status, refused.value.code) == (429, "pictures_full")
    mine[0].open("text", SamplingParams())
    other.open(large(4), SamplingParams())
    mine[0].close()
    mine[4].open(large(4), SamplingParams())
    for one in (*mine[1:], other):
        one.close()
    assert not clients.pictures.num_bytes


async def test_each_choice_holds_a_copy_of_its_pictures_until_the_engine_has_begun_it() -> None:
    ingress = FakeIngress()
    clients = Clients(ingress, ServerSection(max_body_bytes=1 << 20), LimitsSection())
    mine, other = (clients.request(Exchange("name", "me")) for _ in range(2))
    for _ in range(4):
        mine.open(large(0), SamplingParams())
    with pytest.raises(RequestError, match="pictures of 63 MiB are under way, of 64 MiB at most"):
        mine.open(large(0), SamplingParams())
    for stream in ingress.opened:
        stream.has_output = True
    for _ in range(4):
        mine.open(large(0), SamplingParams())
    mine.close()
    twice = msgspec.structs.replace(large(1)[0], pictures=large(1)[0].pictures * 5)
    with pytest.raises(RequestError, match="pictures of 0 MiB are under way"):
        other.open((twice,), SamplingParams())
    other.close()
    assert not clients.pictures.num_bytes
