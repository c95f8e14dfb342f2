"""What a process learns of its cluster: from the environment, the settings that go with it, and its assignment."""

import logging

import pytest

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.host.logs import LogSettings
from engine.types.errors import CallboardError, ConfigError
from engine.workers.cluster.environment import Cluster, check_cluster, read_cluster
from engine.workers.cluster.head import Head
from engine.workers.executor_main import load_rank, settle
from engine.workers.messages import ExecutorAssignment, Place
from tests.workers.machines import cluster, configured, environment


def test_a_rank_takes_its_own_machines_checkpoint_and_gpu_and_looks_whether_it_is_the_same() -> None:
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
    assert read_cluster({}) is None
    assert read_cluster({"WORLD_SIZE": "1", "RANK": "0"}) is None
    found = read_cluster({**environment(1, 29500), "LOCAL_RANK": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == Cluster(rank=1, size=2, local_rank=3, host="127.0.0.1", port=29500, is_served=True)
    by_hand = {name: value for name, value in environment(0, 29500).items() if name != "LOCAL_RANK"}
    assert read_cluster(by_hand) == cluster(0, 29500)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "2"),
        ("LOCAL_RANK", "x"),
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
        read_cluster({**environment(1, 29500), name: value})


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({"executor": "inline"}, "needs placement.executor = 'process'"),
        ({"link": "unix"}, "placement.link='unix': WORLD_SIZE=2 needs 'tcp://HOST:PORT'"),
        ({"cluster_key": ""}, "needs placement.cluster_key"),
        ({"link": "tcp://10.0.0.1:65535"}, "rank r's link is on port 65535 [+] r"),
    ],
)
def test_settings_that_do_not_go_with_several_machines_are_named(placement: dict[str, str], said: str) -> None:
    here = cluster(0, 29500)
    check_cluster(here, configured())
    with pytest.raises(ConfigError, match=said):
        check_cluster(here, configured(**placement))


async def test_links_are_reached_at_rank_0s_address_when_they_listen_everywhere() -> None:
    head = Head(cluster(0, 29500), configured(link="tcp://0.0.0.0:5600"))
    assert (head.listening_place(1), head.reached_by) == ("tcp://0.0.0.0:5601", "127.0.0.1")
    with pytest.raises(CallboardError, match=r"^placement.link: a\.\.b: "):
        Head(cluster(0, 29500), configured(link="tcp://a..b:0")).listening_place(1)
