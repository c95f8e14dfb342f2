"""``comm.pynccl`` against a small fake of NCCL, built here: arguments arrive as they must, errors have words."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from engine.plugins.comm import pynccl as nccl
from engine.plugins.comm.pynccl.group import ID_KEY, NcclComm
from engine.plugins.comm.pynccl.library import LIBRARY, SIGNATURES, NcclError, NcclLibrary, find_library
from engine.plugins.hookspecs import CommContext
from engine.plugins.testing.comm import check_comm
from engine.types.errors import PluginError
from tests.comm.groups import at_once

SOURCE = Path(__file__).with_name("fake_nccl.c")
BAD_STREAM = 0xBAD
COMPILER = shutil.which("cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NcclLibrary:
    if COMPILER is None:
        pytest.skip("no C compiler to build the fake NCCL with")
    built = tmp_path_factory.mktemp("nccl") / LIBRARY
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-pthread", SOURCE, "-o", built], check=True)
    return NcclLibrary(str(built))


@pytest.fixture
def new_group(library: NcclLibrary, tmp_path: Path) -> Iterator[Callable[[int], list[NcclComm]]]:
    made: list[NcclComm] = []

    def new(size: int, stream: int = 0) -> list[NcclComm]:
        path = str(tmp_path / f"store{len(made)}")
        ranks = at_once(size, lambda rank: NcclComm(library, FileStore(path, size), rank, size, lambda: stream))
        made.extend(ranks)
        return ranks

    yield new
    for rank in made:
        rank.close()


def test_the_whole_contract(new_group: Callable[[int], list[NcclComm]]) -> None:
    check_comm(new_group, sizes=(1, 2, 4))


def test_a_call_that_fails_says_what_and_why(new_group: Callable[..., list[NcclComm]]) -> None:
    (alone,) = new_group(1, stream=BAD_STREAM)
    with pytest.raises(NcclError, match=r"ncclAllReduce failed: unhandled system error \(the network is down"):
        alone.all_reduce(torch.ones(2))


def test_a_group_is_left_once_and_without_waiting(
    library: NcclLibrary, new_group: Callable[..., list[NcclComm]]
) -> None:
    counts = ctypes.CDLL(library.path)
    aborted = counts.fakeAborted()
    first, _ = new_group(2)
    first.close()
    first.close()
    assert counts.fakeAborted() - aborted == 1
    with pytest.raises(NcclError, match="rank 0 has left its group"):
        first.all_reduce(torch.ones(2))


def test_a_type_that_nccl_does_not_know(new_group: Callable[..., list[NcclComm]]) -> None:
    (alone,) = new_group(1)
    with pytest.raises(NcclError, match="cannot send torch"):
        alone.all_reduce(torch.ones(2, dtype=torch.complex64))


def test_a_damaged_id_is_refused(library: NcclLibrary, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    store.set(ID_KEY, b"short".hex())
    with pytest.raises(NcclError, match="5 bytes, expected 128"):
        NcclComm(library, store, 1, 2)
    store.set(ID_KEY, bytes(128).hex())
    with pytest.raises(NcclError, match="ncclCommInitRank failed: invalid argument"):
        NcclComm(library, store, 1, 2)


def test_the_version_can_be_read(library: NcclLibrary) -> None:
    assert library.version() == "2.28.3"


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / LIBRARY
    path.write_bytes(content)
    with pytest.raises(NcclError, match=f"cannot be loaded from {path}"):
        NcclLibrary(str(path))


def test_a_library_without_a_function(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler to build a library with")
    source = tmp_path / "old.c"
    old = [name for name in SIGNATURES if name != "ncclAllGather"]
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in old))
    built = tmp_path / LIBRARY
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", built], check=True)
    with pytest.raises(NcclError, match="ncclAllGather"):
        NcclLibrary(str(built))


def test_without_a_gpu_the_plugin_says_what_to_choose() -> None:
    with pytest.raises(PluginError, match=r"not 'cpu'; set plugins\.comm=torch"):
        nccl.callboard_comm(CommContext(0, 2, "cpu", "file:///tmp/x"))


def test_a_missing_library_is_named() -> None:
    options = {"library": "/no/such/libnccl.so.2"}
    with pytest.raises(PluginError, match=r"comm\.pynccl: NCCL cannot be loaded from /no/such"):
        nccl.callboard_comm(CommContext(0, 2, "cuda", "file:///tmp/x", options))


def test_where_torch_brings_none_the_system_is_asked() -> None:
    assert find_library().endswith(LIBRARY)
