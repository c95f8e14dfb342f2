"""The event loop of ``async def`` tests and of servers beside tests: a socket that a test leaves open fails it."""

import warnings

import uvloop


class ClosingLoop(uvloop.Loop):
    """A loop of uvloop that closes what is open at its end, and then raises ResourceWarning.

    uvloop warns before it closes.  In tests a warning is an error, which kept the socket open, and the loop waited for
    it for ever."""

    def close(self) -> None:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", ResourceWarning)
            super().close()
        left = [text for one in noted if (text := str(one.message)).startswith("unclosed resource")]
        if left:
            raise ResourceWarning("; ".join(left))
