"""Two machines on loopback, started by torchrun, generate what one rank does, whatever is killed meanwhile."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from tests.pace import far
from tests.ports import free_port
from tests.workers.executors import alive, children, send, within
from tests.workers.machines.processes import KEY, RANKS, environment, link_to, machine
from tests.workers.server import DEMO, Client, Server, request, run_cli

pytestmark = pytest.mark.slow

TOKENS = 100
STREAMS = 4
# Of a whole group of ranks, beside other tests.
RELOAD_S = 60.0
OVERRIDES = ("placement.max_restarts=20", "placement.silence_timeout_s=5")


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The texts of the streams, from one rank."""
    requests = [request(index, TOKENS) for index in range(STREAMS)]
    names = ("max_tokens", "temperature", "seed", "top_k", "ignore_eos")
    with LLM("demo", progress=False, config={"kv": {"num_pages": 512}}) as llm:
        params = [SamplingParams(**{name: one[name] for name in names}) for one in requests]
        return [done.text for done in llm.generate([one["prompt"] for one in requests], params)]


async def stream(server: Server, during: Callable[[], None] | None = None) -> list[str]:
    """The texts of all streams; ``during`` is called on a thread once all have begun."""
    client = Client(server.url, STREAMS, TOKENS)
    running = asyncio.ensure_future(client.run())
    if during is not None:
        async with asyncio.timeout(far(RELOAD_S)):
            while not client.begun:
                assert not any(client.errors), client.errors
                await asyncio.sleep(0.002)
        await asyncio.to_thread(during)
    await asyncio.wait_for(running, far(RELOAD_S))
    assert client.errors == [None] * STREAMS
    return client.texts


class Machine(Server):
    """The processes of one machine: torchrun, ours, and its ranks."""

    def __init__(self, index: int, ports: tuple[int, int]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={index}"]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={ports[0]}", "--max-restarts=5", "-m", "server.cli"]
        link = f"placement.link={link_to(ports[1])}"
        key = {"CALLBOARD_PLACEMENT__CLUSTER_KEY": KEY}
        super().__init__(*RANKS, *OVERRIDES, link, wait=False, launcher=torchrun, env=key)

    @property
    def ours(self) -> int:
        """The process that torchrun has started."""
        found = children(self.process.pid, "server.cli")
        return found[0] if found else 0

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return children(ours) if (ours := self.ours) else []

    def kill(self) -> None:
        """End it as a loss of power does."""
        ours, ranks = self.ours, self.ranks
        for pid in (self.process.pid, ours):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        within(5, lambda: not any(map(alive, ranks)))

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        super().__exit__()


class Machines:
    """Two machines.  head: the one with the server.  other: the second one, or the latest in its place."""

    def __init__(self) -> None:
        self.ports = free_port(), free_port()
        self.head, self.other = Machine(0, self.ports), Machine(1, self.ports)

    def replace(self) -> None:
        """Start the second machine again."""
        self.other.__exit__()
        self.other = Machine(1, self.ports)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    both = Machines()
    try:
        both.head.url = both.head._read_url()
        yield both
    finally:
        both.other.__exit__()
        both.head.__exit__()


async def test_two_machines_generate_what_one_rank_does(machines: Machines, expected: list[str]) -> None:
    assert await stream(machines.head) == expected
    assert len(machines.head.ranks) == len(machines.other.ranks) == 1
    assert "RANK=1 starts rank 1, linked to tcp://127.0.0.1:" in machines.other.logged()
    for rank in machines.head.ranks + machines.other.ranks:
        assert KEY.encode() not in Path(f"/proc/{rank}/environ").read_bytes(), "a rank has no use for it"


async def test_a_rank_that_is_killed_costs_only_time(machines: Machines, expected: list[str]) -> None:

    def kill() -> None:
        send(signal.SIGKILL, machines.other.ours)
        within(10, lambda: not machines.head.ready())

    assert await stream(machines.head, kill) == expected
    assert machines.head.get("/health")[1]["status"] == "ok"


async def test_a_node_that_is_killed_takes_its_ranks_along_and_torchrun_starts_it_again(
    machines: Machines, expected: list[str]
) -> None:
    before = machines.other.ours

    def kill() -> None:
        (rank,) = machines.other.ranks
        os.kill(before, signal.SIGKILL)
        within(5, lambda: not alive(rank))
        within(10, lambda: not machines.head.ready())

    assert await stream(machines.head, kill) == expected
    assert machines.other.ours not in (0, before)
    assert machines.other.process.poll() is None


async def test_a_machine_that_is_lost_and_started_again_costs_only_time(
    machines: Machines, expected: list[str]
) -> None:

    def lose() -> None:
        machines.other.kill()
        within(10, lambda: not machines.head.ready())
        machines.replace()

    assert await stream(machines.head, lose) == expected


async def test_a_server_that_is_killed_is_started_again_and_its_nodes_find_it(
    machines: Machines, expected: list[str]
) -> None:
    before, (there,) = machines.head.ours, machines.other.ranks
    os.kill(before, signal.SIGKILL)
    within(5, lambda: not alive(there))
    machines.head.url = await asyncio.to_thread(machines.head._read_url)
    assert machines.head.ours not in (0, before)
    assert await stream(machines.head) == expected


async def test_both_machines_drain_and_end_together(machines: Machines, expected: list[str]) -> None:

    def terminate() -> None:
        for one in (machines.other, machines.head):
            one.process.send_signal(signal.SIGTERM)

    assert await stream(machines.head, terminate) == expected
    for one in (machines.head, machines.other):
        one.process.wait(far(20))
    assert "RANK=1: RANK=0 lets it end" in machines.other.logged()
    assert KEY not in machines.head.logged() + machines.other.logged()


async def test_without_torchrun_the_head_serves_the_store_and_a_killed_one_leaves_nothing(expected: list[str]) -> None:
    ports = free_port(), free_port()
    short = ("placement.join_timeout_s=8",)
    with machine(1, ports, *OVERRIDES, *short) as node, machine(0, ports, *OVERRIDES, *short) as head:
        head.url = head._read_url()
        assert await stream(head) == expected
        (here,), (there,) = children(head.process.pid), children(node.process.pid)
        head.process.kill()
        code, logged = node.end(timeout_s=5 + 10)
        within(2, lambda: not alive(here) and not alive(there))
    assert code == 1
    last = logged.strip().splitlines()[-1]
    assert last.startswith(f"callboard: RANK=1: RANK=0 has not answered at 127.0.0.1:{ports[1]} for 8 s: ")
    assert "Traceback" not in logged
    assert KEY not in logged


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3, but device.tensor_parallel=2"),
        ({"RANK": "2"}, "RANK='2': with WORLD_SIZE it must be a number from 0 to 1"),
        ({"CALLBOARD_PLACEMENT__CLUSTER_KEY": ""}, "WORLD_SIZE=2 needs placement.cluster_key"),
        ({"CALLBOARD_PLACEMENT__CLUSTER_KEY": "short"}, "placement.cluster_key: 5 characters, expected at least 32"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_line_and_code_2(variables: dict[str, str], said: str) -> None:
    sections = [part for one in (*RANKS, "placement.link=tcp://127.0.0.1:29600") for part in ("--set", one)]
    ended = run_cli("serve", str(DEMO), *sections, env={**os.environ, **environment(1), **variables})
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith(f"callboard: {said}")


def test_the_key_is_not_printed() -> None:
    ended = run_cli("config", env={**os.environ, **environment(0)})
    assert ended.returncode == 0
    assert 'cluster_key = ""' in ended.stdout
    assert KEY not in ended.stdout
