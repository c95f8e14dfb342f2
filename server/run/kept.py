"""The state of the server's parts that outlives the process of HTTP, if that is one of its own."""

from collections.abc import Callable, Mapping


class Kept:
    """The parts' state, by name.  keep: called with all of it when some has changed."""

    def __init__(
        self, parts: Mapping[str, bytes] | None = None, keep: Callable[[dict[str, bytes]], None] | None = None
    ) -> None:
        self._parts = dict(parts or {})
        self._keep = keep

    def get(self, name: str) -> bytes | None:
        """Return what a part has kept; None for nothing."""
        return self._parts.get(name)

    def put(self, name: str, state: bytes) -> None:
        """Keep the state of a part."""
        self._parts[name] = state
        if self._keep is not None:
            self._keep(dict(self._parts))
