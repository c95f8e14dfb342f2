"""Lists that come in parts: which part a query asks for, and what an answer says of it.

Owns: ``limit``, ``after``, ``order``.  Does not know: what is listed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine.types.errors import FieldError


class ListPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list.  has_more: another one follows it."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Asked(msgspec.Struct, frozen=True):
    """The part of a list that is asked for.

    after: the id behind which the part begins; '' for the beginning.  descending: the newest first."""

    limit: int
    after: str
    descending: bool

    @classmethod
    def by(cls, query: Mapping[str, str], *, default: int, most: int) -> "Asked":
        """Reads a query.  Raises RequestError (400)."""
        given = query.get("limit", str(default))
        if not given.isascii() or not given.isdigit() or len(given) > 6 or not 1 <= int(given) <= most:
            raise FieldError("limit", f"expected a number from 1 to {most}")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise FieldError("order", "must be 'asc' or 'desc'")
        return cls(int(given), query.get("after", ""), order == "desc")

    @property
    def sql(self) -> tuple[str, str]:
        """(what compares a row's number with that of ``after``, how rows are ordered by it)."""
        return ("<", "DESC") if self.descending else (">", "ASC")

    def page(self, ids: Sequence[str], data: Sequence[Any]) -> ListPage:
        """Returns the answer of what was found: one more than ``limit``, if there are so many."""
        shown = ids[: self.limit]
        return ListPage(
            data=list(data[: self.limit]),
            first_id=shown[0] if shown else None,
            last_id=shown[-1] if shown else None,
            has_more=len(ids) > self.limit,
        )
