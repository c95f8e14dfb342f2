"""The host memory that is still available, according to the kernel and the container.

Owns: reading /proc and the control groups.  Does not know: the uses of the memory.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Version:
    """One version of control groups: the place of its groups, and the names of its files.

    limits: the files with a group's limits.  cached: lines of memory.stat for file pages in memory.
    mapped: the line for those of them that processes have mapped, such as their own code; the kernel cannot drop these
    without slowing the processes down."""

    mount: str
    controllers: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]
    mapped: str


VERSIONS = (
    _Version(
        mount="sys/fs/cgroup",
        controllers=("",),
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        cached=("inactive_file", "active_file"),
        mapped="file_mapped",
    ),
    _Version(
        mount="sys/fs/cgroup/memory",
        controllers=("memory",),
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        cached=("total_inactive_file", "total_active_file"),
        mapped="total_mapped_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the machine has left, or that the container may still use if that is less.

    root: the folder of /proc and /sys.  A group's limit holds for all groups below it, so each one from the process's
    own up to the root is read.  Version 1 writes "no limit" as a number larger than any machine's memory, so the
    minimum ignores it."""
    try:
        available = _lines(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):  # not Linux
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for version in VERSIONS:
        for group in own_groups(root, version):
            available = min([available, *_left(group, version)])
    return max(0, available)


def own_groups(root: Path, version: _Version) -> Iterator[Path]:
    """Yield the process's own group and those above it, as far as they are visible from here.

    In a container with a namespace of its own the path is "/".  Without one it is the path on the host, of which only
    the end exists here, or nothing: then the root of the mount is the container's own group."""
    mount = root / version.mount
    path = PurePosixPath(*_own_path(root, version).parts[1:])
    for _ in path.parts:
        if (mount / path / version.usage).exists():
            break
        path = PurePosixPath(*path.parts[1:])
    yield from (mount / one for one in (path, *path.parents))


def _own_path(root: Path, version: _Version) -> PurePosixPath:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return PurePosixPath("/")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if set(version.controllers) <= set(controllers.split(",")) and ".." not in path:
            return PurePosixPath(path)
    return PurePosixPath("/")


def _left(group: Path, version: _Version) -> list[int]:
    """Return the bytes left under each of a group's limits; an empty list for a group without limits."""
    left = []
    for limit in version.limits:
        try:
            allowed = int((group / limit).read_text()) - int((group / version.usage).read_text())
        except (OSError, ValueError):  # the group does not exist, or "max": no limit
            continue
        try:
            stat = _lines(group / "memory.stat")
        except OSError:  # some sandboxes lack it: count no memory as cache
            stat = {}
        cached = sum(stat.get(name, 0) for name in version.cached)
        left.append(allowed + max(0, cached - stat.get(version.mapped, 0)))
    return left


def _lines(path: Path) -> dict[str, int]:
    """Return the first word of each line -> the number after it."""
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def release_freed() -> None:
    """Return memory that this process has freed to the system, if the C library can.  glibc keeps a good part of large
    arrays that come and go: up to a third of the size of a model's weights after they are laid out anew."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def resident_bytes(process: int, root: Path = Path("/")) -> int:
    """Return the memory of a process and all its descendants; 0 if it does not exist.  root: the folder of /proc."""
    folder = root / "proc" / str(process)
    try:
        num_pages = int((folder / "statm").read_text().split()[1])
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except (OSError, IndexError, ValueError):
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child), root) for child in children)
