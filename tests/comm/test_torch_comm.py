"""``comm.torch`` on CPU: the conformance kit over Gloo, and what goes wrong at a start or between ranks."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.plugins.comm.torch import TorchComm, callboard_comm, join_parts
from engine.plugins.hookspecs import CommContext
from engine.plugins.support.rendezvous import local_address, serve_store
from engine.plugins.testing.comm import check_comm
from engine.types.errors import PluginError
from tests.comm.groups import at_once
from tests.ports import free_port


def group(url: str, size: int, **options: object) -> list[TorchComm]:
    return at_once(size, lambda rank: callboard_comm(CommContext(rank, size, "cpu", url, dict(options))))


@pytest.fixture
def new_url(tmp_path: Path) -> Callable[[], str]:
    urls = (f"file://{tmp_path}/group{number}" for number in range(100))
    return lambda: next(urls)


def test_the_whole_contract(new_url: Callable[[], str]) -> None:
    check_comm(lambda size: group(new_url(), size), sizes=(1, 2, 4))


def test_collectives_ask_for_the_current_stream(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    (comm,) = group(new_url(), 1)
    asked: list[bool] = []

    class Nccl:
        """NCCL's group: what is not asynchronous is queued on the current stream, and nothing is left to wait for."""

        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
            asked.append(options.asyncOp)
            tensors[0] += 1

        def _allgather_base(self, gathered: torch.Tensor, tensor: torch.Tensor, options: Any) -> None:
            asked.append(options.asyncOp)
            gathered.copy_(tensor)

    monkeypatch.setattr(comm, "_group", Nccl())
    assert comm.all_reduce(torch.zeros(2)).tolist() == [1, 1]
    assert comm.all_gather(torch.zeros(2)).tolist() == [0, 0]
    assert asked == [False, False]


def test_ranks_meet_at_a_port_as_well() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = group(url, 2, interface="127.0.0.1")
    sums = at_once(2, lambda rank: ranks[rank].all_reduce(torch.tensor([rank + 1.0])).item())
    assert sums == [3.0, 3.0]


def test_ranks_meet_where_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    ranks = group("env:///x", 2, interface="127.0.0.1")
    parts = at_once(2, lambda rank: ranks[rank].all_gather(torch.tensor([rank])).tolist())
    assert parts == [[0, 1], [0, 1]]


def test_groups_of_other_names_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = serve_store("127.0.0.1", port, 5.0)
    for name in ("first", "second"):  # as the generations of one engine's ranks
        ranks = group(f"env:///{name}", 2)
        sums = at_once(2, lambda rank: ranks[rank].all_reduce(torch.tensor([rank + 1.0])).item())  # noqa: B023
        assert sums == [3.0, 3.0]
    assert store.num_keys() > 0


def test_a_port_that_rank_0_cannot_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as another:
        another.bind(("127.0.0.1", 0))
        another.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(another.getsockname()[1]))
        with pytest.raises(PluginError, match="rank 0 of 1 could not meet the others at env:///x: Address already in"):
            group("env:///x", 1)


def test_torchruns_own_store_is_used_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = serve_store("127.0.0.1", port, 5.0)
    ranks = group("env:///x", 2)
    parts = at_once(2, lambda rank: ranks[rank].all_gather(torch.tensor([rank])).tolist())
    assert parts == [[0, 1], [0, 1]]
    assert store.num_keys() > 0


def test_a_store_listens_at_the_address_that_it_is_reached_by() -> None:
    port = free_port()
    store = serve_store("127.0.0.1", port, 5.0)
    with socket.socket() as another:
        another.bind(("127.0.0.2", port))  # free, since nobody listens everywhere
    with pytest.raises(OSError, match="already in use"):
        serve_store("localhost", port, 5.0)
    everywhere = serve_store("192.0.2.77", free_port(), 5.0)  # an address that is translated on the way to us
    assert store.num_keys() == everywhere.num_keys()


def test_the_interface_is_the_one_that_leads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for url in ("file:///tmp/x", "tcp://localhost:1", "env:///x"):
        assert local_address(url) == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert local_address("env:///x") == ""


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_parts_are_joined_as_cat_does(dim: int) -> None:
    parts = torch.arange(3 * 2 * 5 * 4).view(3, 2, 5, 4)
    assert torch.equal(join_parts(parts, dim), torch.cat(tuple(parts), dim))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "rendezvous '', expected one of: file:///path"),
        ("file://", "expected one of"),
        ("tcp://127.0.0.1", "expected one of"),
        ("http://127.0.0.1:80", "expected one of"),
        ("file:///no/such/directory/group", "there is no directory /no/such/directory"),
        ("env:///x", "needs the environment variable 'MASTER_ADDR'"),
    ],
)
def test_a_wrong_rendezvous_is_named(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(PluginError, match=f"comm.torch.*{said}"):
        callboard_comm(CommContext(0, 2, "cpu", url, {"timeout_s": 0.2}))


def test_a_rank_that_stays_alone_gives_up(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="rank 0 of 2"):
        callboard_comm(CommContext(0, 2, "cpu", f"file://{tmp_path}/group", {"timeout_s": 0.3}))


def test_a_rank_that_leaves_is_an_error_for_the_others_not_a_wait(new_url: Callable[[], str]) -> None:
    ranks = group(new_url(), 2, timeout_s=30)
    ranks[1].close()
    with pytest.raises(RuntimeError, match=r"(?i)connection closed|reset|peer|abort"):
        ranks[0].all_reduce(torch.ones(4))
    with pytest.raises(RuntimeError, match="rank 1 has left its group"):
        ranks[1].all_reduce(torch.ones(4))


def test_a_group_is_left_by_force(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL calls an end waits for what is queued, which may wait for a rank that is gone."""
    (alone,) = group(new_url(), 1)
    calls: list[str] = []

    class Group:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: calls.append(name)

    monkeypatch.setattr(alone, "_group", Group())
    alone.close()
    alone.close()
    assert calls == ["abort"]


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(PluginError, match=r"`timeout`.*options: timeout_s, interface"):
        callboard_comm(CommContext(0, 1, "cpu", "file:///tmp/x", {"timeout": 3}))
