"""The turnstile before the handlers: it lets one request in on each turn of the event loop.

Owns: the requests that wait for their turn.  Does not know: what is requested.
Many requests may become readable at once.  Without the turnstile one turn of the event loop handles all of them, and
the tokens of every stream wait until then.  With it, tokens wait for at most one of them, and addresses take turns: a
request waits for one request of each other address, however many those have sent.  The addresses of one /64 of IPv6
count as one, since a single client may use all of them.
"""

import asyncio
from collections import deque
from ipaddress import IPv6Address, IPv6Network


class Turnstile:
    """Lets one request in on each turn of the running event loop."""

    def __init__(self) -> None:
        # By address, those whose turn comes first in front; of one address in the order of arrival.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_taken = False  # this turn has had its request

    async def enter(self, address: str) -> None:
        """Wait for a turn of the event loop that no other request has."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._waiting.setdefault(network_of(address), deque()).append(turn)
        await turn

    def _turn(self) -> None:
        """Let the next request in; called once on each turn while requests come."""
        while self._waiting:
            address = next(iter(self._waiting))
            turns = self._waiting.pop(address)
            turn = turns.popleft()
            if turns:
                self._waiting[address] = turns  # behind the other addresses
            if not turn.done():  # one whose client has left is cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._turn)
                return
        self._is_taken = False


def network_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, also where it is written as one of IPv6, or the /64 of one."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    if parsed.is_loopback:
        return address
    return str(parsed.ipv4_mapped or IPv6Network((int(parsed), 64), strict=False))
