"""The conformance kit for carriers of KV pages: one call checks a carrier, and lists every case that fails.

    from engine.plugins.transfer.kit import check_transfer
    check_transfer(make, ("one", "other"))

Owns: messages and their arrival.  Does not know: torch, what a carrier is made of.
"""

import threading
import time
from collections.abc import Callable

from engine.plugins.hookspecs import TransferContext
from engine.plugins.proof.findings import Findings
from engine.plugins.transfer.transfer import PageCarrier

MOST_BYTES = 4 << 20
PATIENCE_S = 10.0
AT_ONCE_S = 1.0  # what a call may take that must not wait
NUM_MESSAGES = 200

Make = Callable[[str, TransferContext], PageCarrier]


class _End:
    """One rank's carrier, and what has arrived there."""

    def __init__(self, make: Make, name: str) -> None:
        self.arrived: list[tuple[bytes, bytes]] = []
        self._changed = threading.Condition()
        self.carrier = make(name, TransferContext(receive=self._receive, most_bytes=MOST_BYTES))
        assert isinstance(self.carrier, PageCarrier), f"{self.carrier!r} lacks a method of PageCarrier"

    def _receive(self, message: bytes, payload: bytes) -> None:
        with self._changed:
            self.arrived.append((bytes(message), bytes(payload)))
            self._changed.notify_all()

    def gets(self, expected: tuple[bytes, bytes]) -> bool:
        """Return whether a message arrives in time."""
        with self._changed:
            return self._changed.wait_for(lambda: expected in self.arrived, 0.5)


def check_transfer(make: Make, names: tuple[str, str]) -> None:
    """Send messages both ways.  Raises ConformanceError with all that fails.

    make: builds a carrier of rank 0 for the engine of a name; both engines know each other by ``names``."""
    findings = Findings("carrier of pages")
    for name, check in CASES.items():
        with findings.case(name):
            one, other = _End(make, names[0]), _End(make, names[1])
            try:
                check(one, other, names)
            finally:
                one.carrier.close()
                other.carrier.close()
    with findings.case("a name that is used again after its end"):
        for _ in range(2):
            _End(make, names[0]).carrier.close()
    findings.conclude()


def _arrives(one: _End, other: _End, name: str, message: tuple[bytes, bytes]) -> None:
    """Send until a message arrives: a carrier may lose any, and not all."""
    deadline = time.monotonic() + PATIENCE_S
    address = one.carrier.locate(name)
    while True:
        one.carrier.send(address, *message)
        if other.gets(message):
            return
        assert time.monotonic() < deadline, f"a message of {len(message[0])} + {len(message[1])} bytes never arrives"


def _goes_both_ways(one: _End, other: _End, names: tuple[str, str]) -> None:
    for sizes in ((1, 0), (100, 1), (100_000, 0), (40, 1 << 20)):
        message, payload = bytes(range(256)) * (sizes[0] // 256 + 1), bytes(sizes[1])
        pair = message[: sizes[0]], payload
        _arrives(one, other, names[1], pair)
        _arrives(other, one, names[0], pair)


def _has_one_address(one: _End, other: _End, names: tuple[str, str]) -> None:
    assert one.carrier.locate(names[1]) == other.carrier.address, "a peer is located elsewhere than it is"
    assert other.carrier.locate(names[0]) == one.carrier.address, "a peer is located elsewhere than it is"
    _arrives(one, one, names[0], (b"to itself", b""))


def _changes_nothing(one: _End, other: _End, names: tuple[str, str]) -> None:
    sent = [(b"%d" % number, bytes([number % 256]) * 5000) for number in range(NUM_MESSAGES)]
    address = one.carrier.locate(names[1])
    for message in sent:
        one.carrier.send(address, *message)
    _arrives(one, other, names[1], (b"last", b""))
    foreign = [message for message in other.arrived if message not in sent and message[0] != b"last"]
    assert not foreign, f"{len(foreign)} messages arrive that were never sent"


def _never_waits(one: _End, other: _End, names: tuple[str, str]) -> None:
    address = one.carrier.locate(names[1])
    other.carrier.close()
    began = time.monotonic()
    for _ in range(NUM_MESSAGES):
        one.carrier.send(address, b"nothing is there", bytes(1 << 16))
    assert time.monotonic() - began < AT_ONCE_S * 5, "send waits for a peer that has ended"


def _refuses_names(one: _End, other: _End, names: tuple[str, str]) -> None:
    for name in ("", "../elsewhere", "a b", "x" * 500):
        try:
            one.carrier.locate(name)
        except ValueError:
            continue
        raise AssertionError(f"locate takes {name[:20]!r} for the name of an engine")


def _ends_twice(one: _End, other: _End, names: tuple[str, str]) -> None:
    one.carrier.close()
    one.carrier.close()
    one.carrier.send(other.carrier.address, b"after the end", b"")


CASES: dict[str, Callable[[_End, _End, tuple[str, str]], None]] = {
    "messages go both ways": _goes_both_ways,
    "an engine has one address": _has_one_address,
    "nothing arrives that was not sent": _changes_nothing,
    "a peer that has ended": _never_waits,
    "names that no engine has": _refuses_names,
    "an end that comes twice": _ends_twice,
}
