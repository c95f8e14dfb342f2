"""Carries KV pages by NIXL: RDMA where the machine has it, shared memory or TCP elsewhere, by UCX or another backend.

Messages between engines go by ``transfer.tcp``.  NIXL itself asks its peers for no key: whatever reaches its ports may
read the memory that it registers, which is the ring of pages for others, so its network must be closed to strangers.
"""

import secrets
import time
from collections import OrderedDict
from importlib import import_module
from typing import Any, Final

from engine.plugins.hookspecs import TransferContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.transfer.remote_reads import Memory, RemoteReadOptions, RemoteReadTransfer
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["nixl"]}

PLUGIN: Final = "transfer.nixl"
DRAM: Final = "DRAM"
LOOK_EVERY_S: Final = 0.0002
MOST_PEERS: Final = 64


class NixlOptions(RemoteReadOptions, frozen=True, kw_only=True):
    """Options of the plugin, besides those of every carrier, of transfer.tcp and of its ring.

    backend: NIXL's plugin that moves bytes, such as UCX or LIBFABRIC."""

    backend: str = "UCX"


def _api() -> Any:
    """Return NIXL's interface.  Raises PluginError."""
    try:
        return import_module("nixl._api")
    except ImportError as error:
        raise PluginError(f"{PLUGIN} needs the package nixl, which cannot be imported ({error})") from None


class NixlReader:
    """The agent of one rank.  timeout_s: longest time of a read.

    Raises PluginError if the package or the backend is not there."""

    def __init__(self, name: str, backend: str, timeout_s: float, ring: Memory, arrivals: Memory) -> None:
        self._timeout_s = timeout_s
        self._arrivals = arrivals
        # An engine that starts again is another agent: peers may know the one before.
        api = _api()
        self._agent = api.nixl_agent(f"{name}-{secrets.token_hex(8)}", api.nixl_agent_config(backends=[backend]))
        if backend not in self._agent.backends:
            known = ", ".join(self._agent.plugin_list)
            raise PluginError(f"{PLUGIN}: backend={backend!r} is not in this NIXL; it has {known}")
        regions = [(one.address, one.num_bytes, 0, "") for one in (ring, arrivals)]
        self._registered = self._agent.register_memory(regions, DRAM)
        self.pass_on: bytes = self._agent.get_agent_metadata()
        self._peers: OrderedDict[bytes, str] = OrderedDict()

    def read(self, source: bytes, address: int, num_bytes: int) -> bool:
        """Read from another agent.  source: its metadata."""
        agent, handle = self._agent, None
        try:
            peer = self._peer(source)
            here = agent.get_xfer_descs([(self._arrivals.address, num_bytes, 0)], DRAM)
            there = agent.get_xfer_descs([(address, num_bytes, 0)], DRAM)
            handle = agent.initialize_xfer("READ", here, there, peer)
            state, deadline = agent.transfer(handle), time.monotonic() + self._timeout_s
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_S)
                state = agent.check_xfer_state(handle)
        except Exception:  # NIXL has an exception for each status, of a peer that is gone among them
            return False
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def _peer(self, source: bytes) -> str:
        if (known := self._peers.get(source)) is not None:
            self._peers.move_to_end(source)
            return known
        name: Any = self._agent.add_remote_agent(source)
        self._peers[source] = peer = name.decode() if isinstance(name, bytes) else str(name)
        if len(self._peers) > MOST_PEERS:
            self._agent.remove_remote_agent(self._peers.popitem(last=False)[1])
        return peer

    def close(self) -> None:
        """Forget all peers and the memory."""
        for peer in self._peers.values():
            self._agent.remove_remote_agent(peer)
        self._peers.clear()
        self._agent.deregister_memory(self._registered)


@hookimpl
def callboard_transfer(context: TransferContext) -> RemoteReadTransfer:
    """Build the carrier."""
    options = decode_options(PLUGIN, context.options, NixlOptions)

    def new_reader(ring: Memory, arrivals: Memory) -> NixlReader:
        return NixlReader(f"{options.name}.{context.rank}", options.backend, options.timeout_s, ring, arrivals)

    return RemoteReadTransfer(context, options, PLUGIN, new_reader)
