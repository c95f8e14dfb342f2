"""The pictures that the ranks keep encoded, as the planner knows them.

Owns: which pictures there are, and the sequences that need each.  Does not know: messages, pages, what an encoder does.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.text.pictures import PlacedPicture


@dataclass(slots=True)
class _Kept:
    """A picture that every rank keeps, or will.

    num_unanswered: ranks that have not encoded it yet.  users: ids of requests that need it."""

    num_rows: int
    num_unanswered: int
    users: set[int] = field(default_factory=set)


class PictureCache:
    """The pictures that ranks keep, the one that was used last at the end.

    most: rows that all of them may have.  num_ranks: ranks that encode each.
    num_encoded: pictures that were encoded so far.  num_found: pictures that requests found encoded."""

    def __init__(self, num_rows: int, num_ranks: int) -> None:
        self.most = num_rows
        self._num_ranks = num_ranks
        self._kept: dict[str, _Kept] = {}
        self._users: dict[int, set[str]] = {}
        self._num_rows = 0
        self.num_encoded = self.num_found = 0

    @property
    def waiting(self) -> list[int]:
        """The requests without a row that need pictures."""
        return [user for user in self._users if user >= 0]

    @property
    def keys(self) -> list[str]:
        """The keys of all pictures that are kept."""
        return list(self._kept)

    def clear(self) -> None:
        """Forget every picture and every user."""
        self._kept.clear()
        self._users.clear()
        self._num_rows = 0

    def rename(self, user: int, other: int) -> None:
        """Keep the pictures of a request for a row."""
        if (keys := self._users.pop(user, None)) is not None:
            self._users[other] = keys
            for key in keys:
                self._kept[key].users.discard(user)
                self._kept[key].users.add(other)

    def keeps_for(self, user: int, pictures: Iterable[PlacedPicture]) -> bool:
        """Return whether all these pictures are kept for a request, encoded or not."""
        mine = self._users.get(user, ())
        return all(one.key in mine for one in pictures)

    def are_encoded(self, pictures: Iterable[PlacedPicture]) -> bool:
        """Return whether all ranks have these pictures, which are kept."""
        return not any(self._kept[one.key].num_unanswered for one in pictures)

    def take(self, user: int, pictures: Iterable[PlacedPicture]) -> tuple[list[PlacedPicture], list[str]] | None:
        """Keep pictures for a request from now on, all or none.

        Return those that the ranks must encode, and the keys that they must forget first; None without room."""
        wanted = {one.key: one for one in pictures}
        new = [one for key, one in wanted.items() if key not in self._kept]
        short = self._num_rows + sum(len(one.places_n) for one in new) - self.most
        forgotten = []
        for key, kept in self._kept.items():
            if short <= 0:
                break
            if not kept.users and not kept.num_unanswered and key not in wanted:
                forgotten.append(key)
                short -= kept.num_rows
        if short > 0:
            return None
        for key in forgotten:
            self._forget(key)
        self.num_encoded += len(new)
        self.num_found += len(wanted) - len(new)
        for one in new:
            self._kept[one.key] = _Kept(len(one.places_n), self._num_ranks)
            self._num_rows += len(one.places_n)
        for key in wanted:
            kept = self._kept[key] = self._kept.pop(key)
            kept.users.add(user)
        self._users.setdefault(user, set()).update(wanted)
        return new, forgotten

    def leave(self, user: int) -> bool:
        """Keep pictures for a request no longer.  Return whether it had any."""
        keys = self._users.pop(user, set())
        for key in keys:
            self._kept[key].users.discard(user)
        return bool(keys)

    def answered(self, key: str) -> bool:
        """Note that a rank has encoded a picture.  Return whether all have."""
        kept = self._kept[key]
        kept.num_unanswered -= 1
        return not kept.num_unanswered

    def lost(self, key: str) -> set[int]:
        """Forget a picture that a rank cannot encode.  Return its users: requests, and rows that found it cached."""
        users = set(self._kept[key].users)
        for user in users:
            self._users[user].discard(key)
        self._forget(key)
        return users

    def _forget(self, key: str) -> None:
        self._num_rows -= self._kept.pop(key).num_rows
