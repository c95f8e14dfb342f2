"""Bodies under way: how many bytes all clients and each of them have sent of bodies that are not complete.

The files of pictures in open choices are counted in the same way.

Owns: the count and its bounds.  Does not know: what is in a body, how it is read.
"""

from collections import Counter

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError

MOST_OF_ALL = 64  # bodies of the largest size, of all clients together
MOST_OF_ONE = 16
FREE_BYTES = 64 << 10  # of one body, which are not counted; connections are counted too


class Bodies:
    """The bytes of bodies that a server holds.  num_bytes: by client.  what: is held, for errors.

    of_one, of_all: the most that one client and all may have, in bodies of the largest size."""

    def __init__(self, what: str = "bodies", of_one: int = MOST_OF_ONE, of_all: int = MOST_OF_ALL) -> None:
        self.num_bytes: Counter[str] = Counter()
        self.what = what
        self.of_one = of_one
        self.of_all = of_all

    def share(self, client: str, server: ServerSection) -> "Share":
        """Returns what counts one body of a client."""
        return Share(self, client, server.max_body_bytes)


class Share:
    """One body of a client, and how much of it is there.  largest: bytes of the largest body that is taken."""

    def __init__(self, bodies: Bodies, client: str, largest: int) -> None:
        self._bodies = bodies
        self._client = client
        self._largest = largest
        self._held = 0

    def hold(self, num_bytes: int) -> None:
        """Count the body as so long.  Raises RequestError (429) beyond what all, or this client, may have under way."""
        bodies, counts = self._bodies, self._bodies.num_bytes
        if (more := num_bytes - FREE_BYTES - self._held) <= 0:
            return
        for has, most in ((counts[self._client], bodies.of_one), (counts.total(), bodies.of_all)):
            if has + more > most * self._largest:
                raise RequestError(
                    f"{bodies.what} of {has >> 20} MiB are under way, of {most * self._largest >> 20} MiB at most; "
                    "send them one after another",
                    status=429,
                    code=f"{bodies.what}_full",
                    retry_after_s=1,
                )
        self._held += more
        counts[self._client] += more

    def close(self) -> None:
        """Count it no more: it is complete, or will not be."""
        counts = self._bodies.num_bytes
        counts[self._client] -= self._held
        if not counts[self._client]:
            del counts[self._client]
