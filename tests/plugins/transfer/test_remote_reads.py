"""The carriers by NIXL and Mooncake: with stand-ins that take the packages' own calls alone, and with the packages."""

import ctypes
import importlib
import inspect
import queue
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from engine.plugins.hookspecs import TransferContext
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.transfer.kit import check_transfer
from engine.plugins.transfer.transfer import PageCarrier
from engine.types.errors import PluginError
from tests.attention.signatures import as_recorded, definition_in, signature_of
from tests.pace import far

NAMES = ("one", "other")
# Of nixl 1.5.1, from its Python code.
NIXL = {
    "nixl_agent_config.__init__": (
        "self, enable_prog_thread=None, enable_listen_thread=None, listen_port=None, capture_telemetry=None, "
        "num_threads=None, backends=None, sync_mode=None"
    ),
    "nixl_agent.__init__": "self, agent_name, nixl_conf=None, instantiate_all=None",
    "nixl_agent.register_memory": "self, reg_list, mem_type=None, backends=None",
    "nixl_agent.deregister_memory": "self, dereg_list, backends=None",
    "nixl_agent.get_agent_metadata": "self",
    "nixl_agent.add_remote_agent": "self, metadata",
    "nixl_agent.remove_remote_agent": "self, agent",
    "nixl_agent.get_xfer_descs": "self, descs, mem_type=None",
    "nixl_agent.initialize_xfer": (
        "self, operation, local_descs, remote_descs, remote_agent, notif_msg=None, backends=None"
    ),
    "nixl_agent.transfer": "self, handle, notif_msg=None",
    "nixl_agent.check_xfer_state": "self, handle",
    "nixl_agent.release_xfer_handle": "self, handle",
}
# Of mooncake-transfer-engine 0.3.13.post1, from the first lines of its documentation; arguments without a name there
# are by position alone.
MOONCAKE = {
    "initialize": "self, arg0, arg1, arg2, arg3, /",
    "get_rpc_port": "self",
    "register_memory": "self, buffer_addr, capacity, location=None",
    "unregister_memory": "self, arg0, /",
    "transfer_sync_read": "self, target_hostname, buffer, peer_buffer_address, length, transport_hint=None",
}


def signature(parameters: str) -> inspect.Signature:
    return signature_of(definition_in(f"def f({parameters}): ...", "f"))


class StandIn:
    """A class whose calls are bound to signatures first.  RECORDED: of its methods."""

    RECORDED: ClassVar[dict[str, str]] = {}

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        recorded = type(self).RECORDED
        if not callable(found) or name.startswith("_"):
            return found
        assert name in recorded, f"{name} is not in the package"

        def bound(*args: Any, **kwargs: Any) -> Any:
            signature(recorded[name]).bind(self, *args, **kwargs)
            return found(*args, **kwargs)

        return bound


class FakeConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signature(NIXL["nixl_agent_config.__init__"]).bind(self, *args, **kwargs)
        self.backends = kwargs["backends"]


class FakeAgent(StandIn):
    """An agent whose peers are in this process.  A transfer takes two looks."""

    RECORDED: ClassVar[dict[str, str]] = {
        name.partition(".")[2]: parameters for name, parameters in NIXL.items() if "agent." in name
    }
    plugin_list: ClassVar[list[str]] = ["UCX", "POSIX"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signature(NIXL["nixl_agent.__init__"]).bind(self, *args, **kwargs)
        self._name, config = args
        self.backends = {one: 1 for one in config.backends if one in self.plugin_list}
        self._peers: set[str] = set()
        self._open: set[int] = set()

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> object:
        assert kind == "DRAM"
        assert all(len(one) == 4 for one in regions)
        self._regions = regions
        return regions

    def deregister_memory(self, regions: object) -> None:
        assert regions is self._regions
        assert not self._open, "a handle is not released"

    def get_agent_metadata(self) -> bytes:
        return b"metadata of " + self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self._peers.remove(agent)

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], kind: str) -> object:
        assert kind == "DRAM"
        return descs

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> Any:
        assert (operation, peer in self._peers) == ("READ", True)
        self._open.add(id(here))
        return here, there

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        ((here, size, _),), ((there, _, _),) = handle
        ctypes.memmove(here, there, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self._open.remove(id(handle[0]))


class FakeEngine(StandIn):
    """A transfer engine whose peers are in this process."""

    RECORDED = MOONCAKE
    refuses = False

    def initialize(self, host: str, between: str, protocol: str, device: str) -> int:
        assert (between, protocol, device) == ("P2PHANDSHAKE", "tcp", "")
        return -1 if self.refuses else 0

    def get_rpc_port(self) -> int:
        return 17000

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def transfer_sync_read(self, target: str, here: int, there: int, size: int) -> int:
        assert target == "127.0.0.1:17000"
        ctypes.memmove(here, there, size)
        return 0


def options(folder: Path, **more: object) -> dict[str, Any]:
    (folder / "key").write_text("a secret of these tests")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
    peers = {name: f"tcp://127.0.0.1:{one.getsockname()[1]}" for name, one in zip(NAMES, sockets, strict=True)}
    for one in sockets:
        one.close()
    return {"peers": peers, "key_file": str(folder / "key"), "ring_mb": 8, **more}


def maker(plugin: ModuleType, given: dict[str, Any]) -> Callable[[str, TransferContext], PageCarrier]:
    def make(name: str, context: TransferContext) -> PageCarrier:
        carrier: PageCarrier = plugin.callboard_transfer(replace(context, options={**given, "name": name}))
        return carrier

    return make


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Both plugins, upon stand-ins of their packages."""
    api, engine = ModuleType("nixl._api"), ModuleType("mooncake.engine")
    api.nixl_agent, api.nixl_agent_config, engine.TransferEngine = FakeAgent, FakeConfig, FakeEngine  # type: ignore[attr-defined]
    for module in (ModuleType("nixl"), api, ModuleType("mooncake"), engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {name: f"engine.plugins.transfer.{name}" for name in ("nixl", "mooncake")}
    for name in names.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(module) for name, module in names.items()}
    for name in names.values():
        del sys.modules[name]


MORE: dict[str, dict[str, object]] = {"nixl": {}, "mooncake": {"protocol": "tcp"}}


@pytest.mark.parametrize("name", MORE)
def test_pages_are_read_by_the_calls_that_the_package_has(
    name: str, plugins: dict[str, ModuleType], tmp_path: Path
) -> None:
    check_transfer(maker(plugins[name], options(tmp_path, **MORE[name])), NAMES)


def test_a_read_that_fails_is_a_message_that_is_lost(
    plugins: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeAgent, "check_xfer_state", lambda agent, handle: "ERR")
    with pytest.raises(ConformanceError, match="1048576 bytes never arrives"):
        check_transfer(maker(plugins["nixl"], options(tmp_path)), NAMES)


def test_a_library_that_raises_loses_one_message(
    plugins: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def read(engine: FakeEngine, target: str, here: int, there: int, size: int) -> int:
        places.append(there)
        if len(places) == 1:
            raise TypeError("incompatible function arguments")
        ctypes.memmove(here, there, size)
        return 0

    monkeypatch.setattr(FakeEngine, "transfer_sync_read", read)
    given, came = options(tmp_path, protocol="tcp"), queue.Queue[bytes]()
    context = TransferContext(receive=lambda message, _: came.put(message), most_bytes=1 << 20)
    one, other = (maker(plugins["mooncake"], given)(name, context) for name in NAMES)
    with closing(one), closing(other):
        for message in (b"first", b"second"):
            one.send(one.locate("other"), message, bytes(1 << 16))
        assert came.get(timeout=far(10)) == b"second"
    assert len(places) == 2


def test_a_reader_ends_where_messages_cannot_begin(
    plugins: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(FakeEngine, "unregister_memory", lambda engine, address: ended.append(address))
    given = {**options(tmp_path, protocol="tcp"), "name": "one", "key_file": "none"}
    with pytest.raises(PluginError, match=r"transfer\.mooncake: key_file"):
        plugins["mooncake"].callboard_transfer(TransferContext(lambda *_: None, 1 << 20, options=given))
    assert len(ended) == 2


def test_what_cannot_work_is_refused_at_the_start(
    plugins: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = TransferContext(receive=lambda *_: None, most_bytes=1 << 20)
    for name, more in MORE.items():
        given = {**options(tmp_path, **more), "name": "one"}

        def build(group_bytes: int = 0, given: dict[str, Any] = given, name: str = name, **other: str) -> PageCarrier:
            changed = replace(context, group_bytes=group_bytes, options={**given, **other})
            carrier: PageCarrier = plugins[name].callboard_transfer(changed)
            return carrier

        with pytest.raises(PluginError, match=f"transfer.{name}: ring_mb=8 has no room .* at least 10"):
            build(9 << 20)
        with pytest.raises(PluginError, match=f"transfer.{name}: key_file='none' cannot be read"):
            build(key_file="none")
        if name == "nixl":
            with pytest.raises(PluginError, match="backend='OTHER' is not in this NIXL; it has UCX, POSIX"):
                build(backend="OTHER")
        else:
            monkeypatch.setattr(FakeEngine, "refuses", True)
            with pytest.raises(PluginError, match="protocol='tcp' needs no RDMA device"):
                build()


# ---- the packages themselves ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_has_these_calls_and_carries(tmp_path: Path) -> None:
    api = importlib.import_module("nixl._api")
    for name, parameters in NIXL.items():
        kind, _, method = name.partition(".")
        assert as_recorded(inspect.signature(getattr(getattr(api, kind), method))) == signature(parameters), name
    check_transfer(maker(importlib.import_module("engine.plugins.transfer.nixl"), options(tmp_path)), NAMES)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
def test_mooncake_has_these_calls_and_carries(tmp_path: Path) -> None:
    engine = importlib.import_module("mooncake.engine").TransferEngine
    for name, parameters in MOONCAKE.items():
        written = getattr(engine, name).__doc__.strip().partition("\n")[0]
        for parameter in parameters.replace(" /", "").replace("=None", "").split(","):
            assert f"{parameter.strip()}:" in written or not parameter.strip(), f"{written} has no {parameter}"
    plugin = importlib.import_module("engine.plugins.transfer.mooncake")
    check_transfer(maker(plugin, options(tmp_path, protocol="tcp")), NAMES)
