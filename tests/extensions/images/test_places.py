"""Places for work on pictures: a client that fills the queue delays no other for long, and waiting ends."""

import asyncio

import pytest

from engine.types.errors import RequestError
from server.extensions.images import places
from server.extensions.images.places import Places


async def test_a_client_waits_for_one_turn_of_another() -> None:
    made = Places(2, 2)
    began: list[str] = []
    stop = asyncio.Semaphore(0)

    async def work(client: str) -> None:
        async with made.of(client):
            began.append(client)
            await stop.acquire()

    async with asyncio.TaskGroup() as group:
        for client in ("much", "much", "much", "much", "little", "less"):
            group.create_task(work(client))
        for _ in range(6):
            await asyncio.sleep(0.01)
            stop.release()
    assert began == ["much", "much", "little", "less", "much", "much"]


async def test_a_place_stays_free_of_one_client_and_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "WAIT_S", 0.05)
    made = Places(2, 1)
    async with made.of("much"):
        with pytest.raises(RequestError) as error:
            async with made.of("much"):
                pass
        assert (error.value.status, error.value.code) == (503, "pictures_busy")
        async with made.of("little"):
            with pytest.raises(RequestError):
                async with made.of("less"):
                    pass
    async with made.of("much"):
        pass
