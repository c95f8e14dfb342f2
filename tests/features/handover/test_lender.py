"""Loans end whatever becomes of the copies of their pages."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engine.features.handover.desk import Desk, WantedBytes
from engine.features.handover.lender import Lender
from engine.features.handover.messages import Acknowledge, Claim, Fetch, Lend, PageGroup, Report, Returned, Wire
from engine.features.handover.rank import HandoverRank

NAME = b"a transfer"


@pytest.mark.parametrize("content", [b"", b"pages"])
def test_a_loan_whose_copy_fails_is_returned_as_any_other(content: bytes) -> None:
    sent: list[Wire] = []
    reports: list[Report] = []
    desk = Desk(
        address="here",
        model=b"m",
        page_bytes=8,
        send=lambda address, message, payload: sent.append(message),
        report=reports.append,
        later=lambda seconds, call: SimpleNamespace(cancel=lambda: None),
        read=lambda wanted, done: done(content),
    )
    lender = Lender(desk, 1.0, 8)
    lender.claimed(
        Claim(name=NAME, sender="there", model=b"m", cache_salt="", weights="", tokens=b"", first_page=0, offer="")
    )
    lender.lend(Lend(name=NAME, pages=bytes(4)))
    lender.fetched(Fetch(name=NAME, sender="there", group=0))
    assert [type(one) for one in sent].count(PageGroup) == bool(content)
    lender.returned(Acknowledge(name=NAME))
    assert reports[-1] == Returned(name=NAME)
    assert not lender.num_loans


async def test_a_copy_that_fails_is_called_back_without_bytes() -> None:
    rank = object.__new__(HandoverRank)
    rank._rank, rank._loop, rank._changing = 0, asyncio.get_running_loop(), threading.Lock()
    found: asyncio.Future[bytes] = rank._loop.create_future()
    done: Callable[[bytes], None] = found.set_result
    with ThreadPoolExecutor(1) as rank._copies:
        rank._read(WantedBytes(bytes(4)), done)  # there is no pool
        assert await asyncio.wait_for(found, 10) == b""
