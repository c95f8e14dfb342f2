"""What a result file must say about where it was measured: as ``callboard bench`` says it."""

from server.bench.machine import describe_machine

__all__ = ["describe_machine"]
