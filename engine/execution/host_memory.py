"""How much host memory can still be taken, as the kernel and the container see it.

Owns: reading /proc and the control group.  Does not know: what the memory is for.
"""

import os
from pathlib import Path

# Limit, usage, and the line of memory.stat for file cache that the kernel drops when asked; versions 2 and 1.
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has left, or what the container may still use if that is less."""
    try:
        available = _lines(meminfo)["MemAvailable:"] * 1024
    except (OSError, KeyError):  # not Linux
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, usage, stat, cache in CGROUPS:
        try:
            allowed = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
            available = min(available, max(0, allowed + _lines(cgroup / stat).get(cache, 0)))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return available


def _lines(path: Path) -> dict[str, int]:
    """First word of each line -> the number behind it."""
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
