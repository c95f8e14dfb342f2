"""The built-in carriers of pages by the kit, which finds carriers that are wrong; what each of them refuses."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from engine.plugins.hookspecs import TransferContext
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.transfer.kit import check_transfer
from engine.plugins.transfer.shared_memory import SharedMemoryTransfer, callboard_transfer
from engine.plugins.transfer.tcp import TcpOptions, TcpTransfer
from engine.plugins.transfer.transfer import PageCarrier
from engine.types.errors import PluginError

NAMES = ("one", "other")


def nothing(message: bytes, payload: bytes) -> None:
    """Receive and forget."""


def in_memory(folder: Path, name: str, context: TransferContext) -> SharedMemoryTransfer:
    folder.mkdir(mode=0o700, exist_ok=True)
    return SharedMemoryTransfer(context, name, folder, 8 << 20)


def test_shared_memory_carries(tmp_path: Path) -> None:
    check_transfer(lambda name, context: in_memory(tmp_path / "rings", name, context), NAMES)
    left = {path.suffix for path in (tmp_path / "rings").iterdir()}
    assert left <= {".lock"}, "rings and sockets are gone at the end"


@pytest.fixture
def tcp(tmp_path: Path) -> TcpOptions:
    (tmp_path / "key").write_text("a secret of these tests")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
    peers = {name: f"tcp://127.0.0.1:{one.getsockname()[1]}" for name, one in zip(NAMES, sockets, strict=True)}
    for one in sockets:
        one.close()
    return TcpOptions(name=NAMES[0], peers=peers, key_file=str(tmp_path / "key"))


def named(options: TcpOptions, name: str, **changes: str) -> TcpOptions:
    fields = {field: getattr(options, field) for field in options.__struct_fields__}
    return TcpOptions(**fields | {"name": name} | changes)


def test_tcp_carries(tcp: TcpOptions) -> None:
    check_transfer(lambda name, context: TcpTransfer(context, named(tcp, name)), NAMES)


@pytest.mark.slow
def test_a_process_without_the_secret_reaches_nothing_by_tcp(tcp: TcpOptions, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("the secret of another fleet")
    with pytest.raises(ConformanceError, match="never arrives"):
        check_transfer(
            lambda name, context: TcpTransfer(
                context, tcp if name == NAMES[0] else named(tcp, name, key_file=str(tmp_path / "other"))
            ),
            NAMES,
        )


class Stutterer(SharedMemoryTransfer):
    """A carrier whose payloads lose a byte."""

    def send(self, address: str, message: bytes, payload: bytes) -> None:
        super().send(address, message, payload[1:])


@pytest.mark.slow
def test_the_kit_finds_a_carrier_that_changes_what_it_carries(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir(mode=0o700)

    def make(name: str, context: TransferContext) -> PageCarrier:
        return Stutterer(context, name, tmp_path / "rings", 8 << 20)

    with pytest.raises(ConformanceError, match="nothing arrives that was not sent"):
        check_transfer(make, NAMES)


def test_what_others_may_enter_or_another_engine_uses_is_refused(tmp_path: Path) -> None:
    context = TransferContext(receive=nothing, most_bytes=1 << 20)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PluginError, match="mode 0755; set path"):
        SharedMemoryTransfer(context, "one", tmp_path / "open", 1 << 20)
    (tmp_path / "link").symlink_to(tmp_path / "rings")
    with pytest.raises(PluginError, match=r"cannot be used|must be a directory"):
        SharedMemoryTransfer(context, "one", tmp_path / "link", 1 << 20)
    first = in_memory(tmp_path / "rings", "one", context)
    with pytest.raises(PluginError, match=r"another engine uses the name 'one\.0'"):
        in_memory(tmp_path / "rings", "one", context)
    first.close()
    in_memory(tmp_path / "rings", "one", context).close()


def test_tcp_names_what_is_wrong_with_its_options(tcp: TcpOptions, tmp_path: Path) -> None:
    context = TransferContext(receive=nothing, most_bytes=1 << 20)
    with pytest.raises(PluginError, match="cannot be read"):
        TcpTransfer(context, named(tcp, "one", key_file=str(tmp_path / "none")))
    (tmp_path / "key").write_text("short")
    with pytest.raises(PluginError, match="has 5 characters, expected at least 16"):
        TcpTransfer(context, tcp)
    (tmp_path / "key").write_text("a secret of these tests")
    with pytest.raises(ValueError, match="'none' is not in peers"):
        TcpTransfer(context, named(tcp, "none"))


def test_a_ring_without_room_for_a_group_of_pages_is_refused(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "rings"), "ring_mb": 1}
    context = TransferContext(receive=nothing, most_bytes=1 << 20, group_bytes=1 << 20, options=options)
    with pytest.raises(PluginError, match=r"ring_mb=1 has no room for a group of pages of 1048576 bytes.* at least 2"):
        callboard_transfer(context)
    callboard_transfer(replace(context, group_bytes=1 << 19)).close()
