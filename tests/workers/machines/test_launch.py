"""The launch of a process: the environment, the settings that go with it, and the assignment of a rank."""

import logging

import pytest

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.host.logs import LogSettings
from engine.types.errors import ConfigError
from engine.workers.executor_main import load_rank, settle
from engine.workers.machines.head import Head
from engine.workers.machines.launch import Launch, read_launch
from engine.workers.messages import ExecutorAssignment, Place
from tests.workers.machines.processes import configured, environment, launch


def test_a_rank_takes_its_own_machines_checkpoint_and_gpu_and_compares_it() -> None:
    assignment = ExecutorAssignment(
        rank=1,
        num_ranks=2,
        rendezvous="",
        config=configured(),
        num_pages=0,
        most_tokens=0,
        max_len=64,
        capacity=8,
        heartbeat_s=1.0,
        logs=LogSettings(logging.INFO, "text"),
        progress=False,
        fingerprint="another:one",
    )
    here = resolve_checkpoint("demo", "")
    settled = settle(assignment, Place(3, str(here), "none"))
    assert (settled.local_rank, settled.config.model.path, settled.config.model.tokenizer) == (3, str(here), "none")
    with pytest.raises(ConfigError, match=f"^rank 1: model.path={here}: not the checkpoint of rank 0"):
        load_rank(settled)
    assert settle(assignment, Place(0)).config == assignment.config, "the head's own rank has the head's"


def test_the_environment_is_read_as_launchers_set_it() -> None:
    config = configured(num_ranks=16)
    found = read_launch({**environment(1, size=2), "TORCHELASTIC_USE_AGENT_STORE": "True"}, config)
    assert found == Launch(
        index=1, size=2, local_index=0, ranks=8, host="127.0.0.1", port=29600, listens_on="127.0.0.1"
    )
    assert found.address(1) == "127.0.0.1:29601"
    by_hand = {name: value for name, value in environment(1, size=2).items() if name != "LOCAL_RANK"}
    assert read_launch(by_hand, config) == found


def test_a_process_has_its_share_of_the_ranks_and_of_its_machines_gpus() -> None:
    per_machine = launch(1, configured(num_ranks=16), size=2)
    assert [per_machine.place(rank) for rank in (7, 8, 15)] == [None, Place(0), Place(7)]
    per_gpu = read_launch({**environment(9, size=16), "LOCAL_RANK": "1"}, configured(num_ranks=16))
    assert [per_gpu.place(rank) for rank in (8, 9, 10)] == [None, Place(1), None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "2"),
        ("LOCAL_RANK", "x"),
        ("MASTER_PORT", ""),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "²"),
        ("MASTER_ADDR", ""),
        ("MASTER_ADDR", "a b"),
        ("MASTER_ADDR", "a/b"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}='{value}'"):
        read_launch({**environment(1), name: value}, configured())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"executor": "inline"}, "needs placement.executor = 'process'"),
        ({"link": "unix"}, "placement.link='unix': WORLD_SIZE=2 needs 'tcp://HOST:PORT'"),
        ({"link": "tcp://10.0.0.1:0"}, "joins at PORT [+] r, so PORT is from 1 to 65534"),
        ({"link": "tcp://10.0.0.1:65535"}, "PORT is from 1 to 65534"),
        ({"key": ""}, "needs placement.cluster_key"),
        ({"num_ranks": 3}, "WORLD_SIZE=2, but device.tensor_parallel=3: every process runs the same number of ranks"),
    ],
)
def test_settings_that_do_not_go_with_several_machines_are_named(settings: dict[str, str], said: str) -> None:
    launch(0, configured())
    with pytest.raises(ConfigError, match=said):
        launch(0, configured(**settings))


async def test_links_are_reached_at_rank_0s_address_when_they_listen_everywhere() -> None:
    config = configured(link="tcp://0.0.0.0:5600")
    head = Head(launch(0, config), config)
    assert (head.where, head.launch.address(1)) == ("tcp://0.0.0.0:0", "127.0.0.1:5601")
    nowhere = configured(link="tcp://a..b:5600")
    with pytest.raises(ConfigError, match=r"^placement.link: a\.\.b: "):
        await Head(launch(0, nowhere), nowhere).__aenter__()
