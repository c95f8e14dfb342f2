"""Two machines on loopback share a model: what one rank says, through the death of everything that may die."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from tests.pace import far
from tests.workers.executors import alive, children, send, within
from tests.workers.machines import KEY, RANKS, environment, free_port, machine
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


class Machines:
    """head: with the server.  node: the other one, or the latest of those that have had its place."""

    def __init__(self, head: Server, node: Server, port: int) -> None:
        self.head = head
        self.node = node
        self.port = port

    def replace_node(self) -> None:
        """Start the other machine's command again."""
        self.node.__exit__()
        self.node = machine(1, self.port, *OVERRIDES)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    port = free_port()
    with machine(0, port, *OVERRIDES) as head:
        both = Machines(head, machine(1, port, *OVERRIDES), port)
        try:
            head.url = head._read_url()
            yield both
        finally:
            both.node.__exit__()


async def test_two_machines_say_what_one_rank_says(machines: Machines, expected: list[str]) -> None:
    assert await stream(machines.head) == expected
    assert len(children(machines.head.process.pid)) == len(children(machines.node.process.pid)) == 1
    assert "joins generation 1 at tcp://127.0.0.1:" in machines.node.logged()
    for process in (machines.head.process, machines.node.process):
        (executor,) = children(process.pid)
        assert KEY.encode() not in Path(f"/proc/{executor}/environ").read_bytes(), "an executor has no use for it"


async def test_a_remote_executor_that_is_killed_costs_nothing_but_time(machines: Machines, expected: list[str]) -> None:

    def kill() -> None:
        send(signal.SIGKILL, machines.node.process.pid)
        within(10, lambda: not machines.head.ready())

    assert await stream(machines.head, kill) == expected
    assert machines.head.get("/health")[1]["status"] == "ok"
    assert "joins generation 2" in machines.node.logged()


async def test_a_node_that_is_killed_takes_its_executor_along_and_another_takes_its_place(
    machines: Machines, expected: list[str]
) -> None:

    def kill() -> None:
        (executor,) = children(machines.node.process.pid)
        machines.node.process.kill()
        within(5, lambda: not alive(executor))
        within(10, lambda: not machines.head.ready())
        machines.replace_node()

    assert await stream(machines.head, kill) == expected


def test_a_killed_head_leaves_nothing_on_any_machine(machines: Machines) -> None:
    within(10, lambda: bool(children(machines.node.process.pid)))
    (here,) = children(machines.head.process.pid)
    (there,) = children(machines.node.process.pid)
    machines.head.process.kill()
    code, logged = machines.node.end(timeout_s=5 + 10)
    within(2, lambda: not alive(here) and not alive(there))
    assert code == 1
    assert re.fullmatch(
        rf"callboard: rank 1: rank 0 is gone: the store at 127.0.0.1:{machines.port} has closed", last_line(logged)
    )
    assert "Traceback" not in logged
    assert KEY not in logged + machines.head.logged()


async def test_under_torchrun_on_two_nodes_they_drain_and_end_together(expected: list[str]) -> None:
    port = free_port()
    agents = []
    for node in range(2):
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "server.cli"]
        agents.append(Server(*RANKS, *OVERRIDES, wait=False, launcher=torchrun, env=launched()))
    head, other = agents
    with head, other:
        head.url = head._read_url()

        def terminate() -> None:
            for agent in agents:
                agent.process.send_signal(signal.SIGTERM)

        assert await stream(head, terminate) == expected
        for agent in agents:
            agent.process.wait(far(20))
        assert "a launcher's, at 127.0.0.1" in head.logged()
        assert "rank 1: rank 0 is done" in other.logged()


def launched() -> dict[str, str]:
    return {"CALLBOARD_PLACEMENT__CLUSTER_KEY": KEY}


def last_line(logged: str) -> str:
    return logged.strip().splitlines()[-1]


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
    sections = [part for one in RANKS for part in ("--set", one)]
    ended = run_cli("serve", str(DEMO), *sections, env={**os.environ, **environment(1, free_port()), **variables})
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith(f"callboard: {said}")


def test_the_key_is_not_printed() -> None:
    ended = run_cli("config", env={**os.environ, **environment(0, 1)})
    assert ended.returncode == 0
    assert 'cluster_key = ""' in ended.stdout
    assert KEY not in ended.stdout
