"""The length of a lease, and the pages that a client's leases may hold."""

import pytest

from engine.features.sessions import leases
from engine.features.sessions.leases import Leases, SessionKey
from engine.kv.node import Handle, Node
from engine.plugins.eviction.lease import LeaseOptions

A, B = SessionKey("one", "a"), SessionKey("two", "a")
OPTIONS = LeaseOptions(max_lease_s=100.0, leased_share=0.5)


def prefix(num_pages: int, after: Handle | None = None) -> Handle:
    """The handle of a request that keeps so many pages, behind those of another one."""
    above, num_above = (None, 0) if after is None else (after.node, after.num_pages)
    return Handle(Node(above, b"", bytearray(), bytearray(4 * num_pages), 0, 0), num_above + num_pages, 0)


def turn(
    ledger: Leases, key: SessionKey, at: float, num_pages: int = 10, ttl_s: float = 0.0, kept: Handle | None = None
) -> float:
    """The lease behind a request that comes and ends at once."""
    ledger.begin(key, at)
    ledger.end(key, at)
    return ledger.grant(key, kept or prefix(num_pages), ttl_s, at)


def test_a_lease_is_as_long_as_pauses_take() -> None:
    ledger = Leases(1000, OPTIONS)
    assert turn(ledger, A, 0.0) == 60.0, "nothing is known yet"
    for number in range(15):
        assert turn(ledger, A, 2.0 * (number + 1)) == 60.0
    assert turn(ledger, A, 35.0) == 5.0, "15 pauses of 2 seconds and one of 5"
    assert turn(ledger, B, 35.0) == 5.0, "a new client is like the others"
    for number in range(17):
        turn(ledger, B, 35.0 + 50 * (number + 1))
    assert turn(ledger, B, 885.0) == 50.0
    assert turn(ledger, SessionKey("one", "b"), 885.0) == 5.0, "clients differ"


def test_pauses_of_old_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_CLIENTS", 2)
    ledger = Leases(1000, OPTIONS)
    for number in range(3):
        for at in range(20):
            turn(ledger, SessionKey(str(number), "s"), float(1000 * number + 3 * at + at % 2 * number))
    assert turn(ledger, SessionKey("1", "t"), 5000.0) == 4.0
    assert turn(ledger, SessionKey("0", "t"), 5000.0) == 5.0, (
        "its pauses of 3 seconds are forgotten: those of all count"
    )


def test_a_time_that_is_asked_for_is_taken_up_to_the_limit() -> None:
    ledger = Leases(1000, OPTIONS)
    assert turn(ledger, A, 0.0, ttl_s=60.0) == 60.0
    assert turn(ledger, A, 0.0, ttl_s=3600.0) == 100.0


def test_clients_divide_the_budget_and_one_cannot_take_anothers() -> None:
    ledger = Leases(100, OPTIONS)
    assert turn(ledger, A, 0.0, num_pages=40)
    assert turn(ledger, SessionKey("one", "b"), 0.0, num_pages=20) == 0.0, "50 pages are for leases"
    assert ledger.num_held == 40
    assert turn(ledger, B, 1.0, num_pages=25)
    assert turn(ledger, SessionKey("two", "b"), 1.0, num_pages=5) == 0.0, "two clients have 25 each"
    assert turn(ledger, SessionKey("one", "c"), 200.0, num_pages=50), "leases have ended"
    assert ledger.num_held == 50


def test_a_session_that_goes_on_counts_its_prefix_once() -> None:
    ledger = Leases(1000, OPTIONS)
    first = prefix(10)
    assert turn(ledger, A, 0.0, kept=first) == 60.0
    assert turn(ledger, A, 20.0, kept=prefix(7, first), ttl_s=90.0) == 90.0
    assert ledger.num_held == 17
    turn(ledger, B, 70.0)
    assert ledger.num_held == 27, "the first lease would have ended at 60"
    ledger.begin(B, 110.0)
    assert ledger.num_held == 10


def test_a_prefix_that_a_session_has_left_counts_up_to_the_end_of_its_lease() -> None:
    ledger = Leases(1000, LeaseOptions(max_lease_s=100.0))
    assert turn(ledger, B, 0.0, num_pages=500, ttl_s=90.0)
    assert turn(ledger, A, 0.0, num_pages=500)
    for number in range(9):
        assert turn(ledger, A, 1.0 + number, num_pages=500) == 0.0, "the pages of the first one are still leased"
    assert ledger.num_held == 1000
    assert turn(ledger, A, 60.0, num_pages=500)


def test_of_a_prefix_that_a_session_has_left_the_common_part_counts_once() -> None:
    ledger = Leases(1000, OPTIONS)
    shared = prefix(100)
    main = prefix(200, shared)
    assert turn(ledger, A, 0.0, kept=main, ttl_s=90.0)
    assert turn(ledger, A, 1.0, kept=prefix(50, shared), ttl_s=5.0)
    assert ledger.num_held == 350
    ledger.begin(A, 10.0)
    assert ledger.num_held == 350, "the shared pages are leased up to 90"
    assert turn(ledger, A, 10.0, kept=prefix(10, main), ttl_s=90.0)
    assert ledger.num_held == 360
    ledger.begin(A, 100.0)
    assert ledger.num_held == 0


def test_what_a_request_has_found_counts_again_with_its_next_lease() -> None:
    ledger = Leases(1000, OPTIONS)
    shared = prefix(100)
    assert turn(ledger, A, 0.0, kept=prefix(200, shared), ttl_s=90.0)
    ledger.begin(A, 1.0)
    ledger.found(A, shared)
    assert ledger.num_held == 200
    assert ledger.grant(A, prefix(50, shared), 5.0, 1.0) == 5.0
    ledger.begin(A, 10.0)
    assert ledger.num_held == 350, "the shared pages are leased up to 90"


def test_after_the_cache_is_lost_leases_begin_anew_and_pauses_are_known() -> None:
    ledger = Leases(1000, OPTIONS)
    kept = prefix(10)
    turn(ledger, A, 0.0, ttl_s=90.0, kept=kept)
    ledger.found(A, kept)  # what it has found stays leased for 90 seconds
    ledger.clear()
    turn(ledger, A, 5.0, ttl_s=10.0)
    assert ledger.num_held == 10
    ledger.expire(15.0)
    assert ledger.num_held == 0
    assert ledger._pauses.sorted == [5.0]


def test_nothing_is_leased_to_a_request_that_keeps_nothing() -> None:
    ledger = Leases(1000, OPTIONS)
    assert turn(ledger, A, 0.0, num_pages=0) == 0.0


def test_leases_that_have_ended_do_not_count_when_a_request_comes() -> None:
    ledger = Leases(1000, OPTIONS)
    turn(ledger, A, 0.0)
    ledger.begin(B, 61.0)
    assert ledger.num_held == 0


def test_requests_at_once_are_no_pause() -> None:
    ledger = Leases(1000, OPTIONS)
    for number in range(8):
        ledger.begin(A, float(number))
    for number in range(8):
        ledger.end(A, 10.0 + number)
    assert ledger.grant(A, prefix(1), 0.0, 18.0) == 60.0


def test_sessions_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_SESSIONS", 4)
    ledger = Leases(1000, OPTIONS)
    for number in range(10):
        turn(ledger, SessionKey("one", str(number)), 0.0)
    assert ledger.num_held == 100, "what they leased stays leased"
    assert ledger.grant(SessionKey("one", "0"), prefix(10), 0.0, 0.0) == 0.0
    ledger.begin(A, 61.0)
    assert ledger.num_held == 0


def test_a_session_that_was_forgotten_with_an_open_request_still_has_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_SESSIONS", 1)
    monkeypatch.setattr(leases, "ENOUGH", 1)
    ledger = Leases(1000, OPTIONS)
    ledger.begin(A, 0.0)
    ledger.begin(B, 0.0)
    ledger.begin(A, 0.0)
    ledger.end(A, 1.0)
    ledger.end(A, 1.0)  # of the request that had begun before
    turn(ledger, A, 5.0)
    assert ledger.expected("one") == 4.0


def test_sessions_that_do_not_come_back_get_no_first_lease() -> None:
    ledger = Leases(1000, LeaseOptions(max_lease_s=100.0))
    first = [turn(ledger, SessionKey("one", str(number)), float(number), num_pages=1) for number in range(20)]
    assert first == [60.0] * 16 + [0.0] * 4, "16 that have not come back are few"
    assert turn(ledger, SessionKey("one", "asked"), 20.0, num_pages=1, ttl_s=30.0) == 30.0, "the client knows more"
    assert turn(ledger, SessionKey("one", "19"), 21.0, num_pages=1) == 60.0, "this one has come back"
    assert turn(ledger, SessionKey("two", "a"), 21.0, num_pages=1) == 60.0, "another client's sessions may"
    for number in range(5, 10):
        turn(ledger, SessionKey("one", str(number)), 22.0, num_pages=1)
    assert turn(ledger, SessionKey("one", "new"), 23.0, num_pages=1), "a quarter has come back"
