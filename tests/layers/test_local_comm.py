"""A group of one rank: nothing is exchanged, and it says so when there are more."""

import pytest
import torch

from engine.plugins.comm.local import callboard_comm
from engine.plugins.hookspecs import CommContext
from engine.types.errors import PluginError


def test_hook_callboard_comm_gives_a_group_of_one():
    comm = callboard_comm(CommContext(rank=0, size=1, device="cpu"))
    x = torch.arange(6.0).view(2, 3)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce(x) is x
    assert torch.equal(comm.all_gather(x), x)
    comm.close()


def test_more_ranks_are_refused():
    with pytest.raises(PluginError, match="serves one rank, not 2"):
        callboard_comm(CommContext(rank=0, size=2, device="cpu"))
