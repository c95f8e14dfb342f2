"""What a process may still take: the machine, its control group and those above it, in both versions."""

from pathlib import Path

import pytest
import torch

from engine.execution import device as devices
from engine.execution.device import fair_share, free_bytes, host_place
from engine.host.memory import available_bytes

MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  500 kB\nHugePages_Total: 0\n"
MACHINE = 500 << 10


def tree(root: Path, files: dict[str, str], own: str = "0::/\n") -> Path:
    """/proc and /sys/fs/cgroup as a process sees them.  own: its /proc/self/cgroup."""
    every = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own}
    every |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in every.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def second(group: str, limit: str, usage: int, stat: str = "", high: str = "max") -> dict[str, str]:
    files = {"memory.max": limit, "memory.high": high, "memory.current": str(usage), "memory.stat": stat}
    return {f"{group}{name}": f"{text}\n" for name, text in files.items()}


def first(group: str, limit: int, usage: int, stat: str = "") -> dict[str, str]:
    files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(usage), "memory.stat": stat}
    return {f"memory/{group}{name}": f"{text}\n" for name, text in files.items()}


NO_LIMIT = 9223372036854771712
DOCKER = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n"


@pytest.mark.parametrize(
    ("files", "own", "available"),
    [
        pytest.param({}, "0::/\n", MACHINE, id="no groups"),
        pytest.param(second("", "max", 1), "0::/\n", MACHINE, id="no limit"),
        pytest.param(second("", "9000", 2000), "0::/\n", 7000, id="a container's namespace"),
        pytest.param(second("", "9000", 9999), "0::/\n", 0, id="nothing left"),
        pytest.param(second("", "9000", 2000, high="5000"), "0::/\n", 3000, id="throttled first"),
        pytest.param(second("", "max", 2000, high="5000"), "0::/\n", 3000, id="throttled only"),
        pytest.param(second("", "9000", 2000, "anon 1\ninactive_file 500"), "0::/\n", 7500, id="cache is dropped"),
        pytest.param(
            second("", "9000", 2000, "inactive_file 500\nactive_file 300\nfile_mapped 600"),
            "0::/\n",
            7200,
            id="but for code that runs",
        ),
        pytest.param(
            {name: text for name, text in second("", "9000", 2000).items() if name != "memory.stat"},
            "0::/\n",
            7000,
            id="nothing is known of cache",
        ),
        pytest.param(second("a/b/", "9000", 2000), "0::/a/b\n", 7000, id="its own group"),
        pytest.param(
            second("a/b/", "9000", 2000) | second("a/", "8000", 6000), "0::/a/b\n", 2000, id="a group above it"
        ),
        pytest.param(second("a/b/", "max", 1) | second("a/", "8000", 6000), "0::/a/b\n", 2000, id="only above it"),
        pytest.param(second("a/", "10", 1) | second("b/", "9000", 2000), "0::/b\n", 7000, id="not one beside it"),
        pytest.param(second("", "9000", 2000), "0::/../../other\n", 7000, id="moved out of its namespace"),
        pytest.param(first("", NO_LIMIT, 1), "4:memory:/\n", MACHINE, id="1: no limit"),
        pytest.param(first("", 1000, 600, "total_inactive_file 3"), "4:memory:/\n", 403, id="1: cache"),
        pytest.param(first("", 1000, 600), DOCKER, 400, id="1: the path is the host's"),
        pytest.param(
            first("s/", 1000, 600) | first("", 5000, 700), "4:memory:/docker/abc/s\n", 400, id="1: its end is"
        ),
        pytest.param(first("a/", 1000, 600) | first("", NO_LIMIT, 700), "4:memory:/a\n", 400, id="1: its own group"),
        pytest.param(first("a/", 1000, 600) | second("", "max", 5), "4:memory:/a\n0::/\n", 400, id="both"),
    ],
)
def test_available_memory_is_what_the_machine_and_every_group_allow(
    tmp_path: Path, files: dict[str, str], own: str, available: int
) -> None:
    assert available_bytes(tree(tmp_path, files, own)) == available


def test_this_machine_has_some() -> None:
    assert available_bytes() > 1 << 20


def test_a_cpu_has_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_bytes", lambda: 12345)
    assert free_bytes(torch.device("cpu")) == 12345


def test_a_place_is_a_machine_that_runs_and_its_container_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(name: str, boot: str, namespace: str = "") -> int:
        root = tmp_path / f"{boot}{namespace}"
        files = {"proc/sys/kernel/random/boot_id": boot, **({"proc/self/ns/cgroup": ""} if namespace else {})}
        for file, text in files.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        monkeypatch.setattr("socket.gethostname", lambda: name)
        return host_place(root)

    assert place("a", "1") == place("b", "1")
    assert len({place("a", "1"), place("a", "2"), place("a", "1", "x"), place("a", "1", "y")}) == 4
    assert host_place() == host_place()


class Gathered:
    """The communicator of one rank, with what the others say."""

    def __init__(self, *others: list[int]) -> None:
        self.rank, self.size, self._others = 0, 1 + len(others), others

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat((tensor, torch.tensor(self._others, dtype=torch.int64)), dim)

    def close(self) -> None:
        raise AssertionError


def test_ranks_share_the_memory_of_their_machine_and_none_else() -> None:
    cpu = torch.device("cpu")
    assert fair_share(900, 7, Gathered([7, 800], [7, 850]), cpu) == 800 // 3
    assert fair_share(900, 7, Gathered([8, 300]), cpu) == 300
    assert fair_share(900, 7, Gathered([7, 1000], [8, 300]), cpu) == 300
