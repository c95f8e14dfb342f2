"""Captures of several ranks: what one rank cannot capture no rank captures, wherever it fails, and nobody waits."""

import pytest
import torch

from engine.graphs.capturing import Capturing
from engine.plugins.testing import threads
from engine.plugins.testing.threads import on_ranks
from engine.types.errors import GraphError
from tests.graphs.recording import RecordingDevice

SIZES = (2, 4, 8)
CPU = torch.device("cpu")


def outcome(comm, how, fails_in, fails_at, fails_on):
    """What a rank says, how often it has forgotten what it captured, and how many vote yes afterwards."""
    forgotten = []

    def working(name):
        def work(size):
            if (name, size) == (fails_in, fails_at) and comm.rank in fails_on:
                raise RuntimeError("out of memory")

        return work

    capturing = Capturing(RecordingDevice(), comm, CPU)
    arguments = (SIZES, working("warm_up"), working("record"), lambda: forgotten.append(True))
    said = ""
    try:
        if how == "capture":
            capturing.capture("steps", *arguments, advice="turn them off", progress=False)
        else:
            capturing.measure(*arguments, advice="turn them off")
    except GraphError as error:
        said = str(error)
    return said, len(forgotten), capturing.num_agreeing(True)


@pytest.mark.parametrize("fails_on", [(1,), (0, 2)])
@pytest.mark.parametrize("where", [("warm_up", 8), ("warm_up", 4), ("record", 8), ("record", 4), ("record", 2)])
@pytest.mark.parametrize("how", ["capture", "measure"])
def test_one_ranks_failure_is_every_ranks(monkeypatch, how, where, fails_on):
    if how == "measure" and where[1] == 2:
        pytest.skip("only the two largest are tried")
    monkeypatch.setattr(threads, "TIMEOUT_S", 20)
    found = on_ranks(3, lambda comm: outcome(comm, how, *where, fails_on))
    for rank, (said, num_forgotten, agreeing) in enumerate(found):
        cause = "RuntimeError: out of memory" if rank in fails_on else "another rank failed"
        assert f"({cause}); turn them off" in said
        assert num_forgotten == 1
        assert agreeing == 3, "a vote was left over"


@pytest.mark.parametrize("how", ["capture", "measure"])
def test_where_nobody_fails_nobody_hears_of_it(how):
    assert {(said, agreeing) for said, _, agreeing in on_ranks(2, lambda comm: outcome(comm, how, "", 0, ()))} == {
        ("", 2)
    }


@pytest.mark.parametrize("how", ["capture", "measure"])
def test_ranks_that_would_capture_other_sizes_say_so_before_any_capture(how):
    def one_rank(comm):
        capturing, done = Capturing(RecordingDevice(), comm, CPU), []
        arguments = ((8, 4, 2) if comm.rank else (16, 8), done.append, done.append, lambda: None)
        with pytest.raises(GraphError) as found:
            if how == "capture":
                capturing.capture("steps", *arguments, advice="turn them off", progress=False)
            else:
                capturing.measure(*arguments, advice="turn them off")
        return str(found.value), done, capturing.num_agreeing(True)

    for said, done, agreeing in on_ranks(2, one_rank):
        assert "(rank 0: 2 up to 16; rank 1: 3 up to 8); give all ranks the same configuration" in said
        assert (done, agreeing) == ([], 2)


def test_ranks_whose_sizes_are_for_other_steps_say_so():
    def one_rank(comm):
        capturing = Capturing(RecordingDevice(), comm, CPU)
        what = ("steps with prefill", "decode steps")[comm.rank]
        with pytest.raises(GraphError, match="ranks would capture different sizes"):
            capturing.capture(what, (4, 2), pytest.fail, pytest.fail, list, advice="", progress=False)

    on_ranks(2, one_rank)
