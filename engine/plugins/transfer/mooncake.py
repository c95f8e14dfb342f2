"""Carries KV pages by Mooncake's transfer engine, over RDMA or TCP.

Messages between engines go by ``transfer.tcp``.  Mooncake itself asks its peers for no key: whatever reaches its ports
may read the memory that it registers, which is the ring of pages for others, so its network must be closed to
strangers.
"""

from importlib import import_module
from typing import Any, Final, Literal

from engine.plugins.hookspecs import TransferContext, hookimpl
from engine.plugins.options import decode_options
from engine.plugins.transfer.remote_reads import Memory, RemoteReadOptions, RemoteReadTransfer
from engine.plugins.transfer.tcp import PLACE
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1, "packages": ["mooncake"]}

PLUGIN: Final = "transfer.mooncake"
BETWEEN_PEERS: Final = "P2PHANDSHAKE"  # instead of a server that knows all engines


class MooncakeOptions(RemoteReadOptions, frozen=True, kw_only=True):
    """Options of the plugin, besides those of every carrier, of transfer.tcp and of its ring.

    protocol: rdma or tcp.  device: names of the RDMA devices with commas between them; auto is all that it finds."""

    protocol: Literal["rdma", "tcp"] = "rdma"
    device: str = "auto"


def _engine() -> Any:
    """Return a transfer engine that has not begun.  Raises PluginError."""
    try:
        return import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise PluginError(f"{PLUGIN} needs the package mooncake, which cannot be imported ({error})") from None


class MooncakeReader:
    """The transfer engine of one rank.  Raises PluginError if it cannot begin."""

    def __init__(self, host: str, protocol: str, device: str, ring: Memory, arrivals: Memory) -> None:
        self._arrivals = arrivals
        self._memories = ring, arrivals
        self._engine = _engine()
        if code := self._engine.initialize(host, BETWEEN_PEERS, protocol, "" if device == "auto" else device):
            raise PluginError(
                f"{PLUGIN}: Mooncake does not begin at {host} with protocol={protocol!r} and device={device!r} "
                f"(code {code}); its log has the reason, and protocol='tcp' needs no RDMA device"
            )
        for one in self._memories:
            if code := self._engine.register_memory(one.address, one.num_bytes):
                raise PluginError(f"{PLUGIN}: {one.num_bytes >> 20} MB of memory cannot be registered (code {code})")
        self.pass_on = f"{host}:{self._engine.get_rpc_port()}".encode()

    def read(self, source: bytes, address: int, num_bytes: int) -> bool:
        """Read from another engine.  source: where it listens."""
        name = source.decode("ascii", "replace")
        return bool(self._engine.transfer_sync_read(name, self._arrivals.address, address, num_bytes) == 0)

    def close(self) -> None:
        """Forget the memory."""
        for one in self._memories:
            self._engine.unregister_memory(one.address)


@hookimpl
def callboard_transfer(context: TransferContext) -> RemoteReadTransfer:
    """Build the carrier."""
    options = decode_options(PLUGIN, context.options, MooncakeOptions)
    place = PLACE.fullmatch((options.peers or {}).get(options.name, ""))
    host = place[1] if place is not None else "127.0.0.1"  # without a place of its own the messages are refused

    def new_reader(ring: Memory, arrivals: Memory) -> MooncakeReader:
        return MooncakeReader(host, options.protocol, options.device, ring, arrivals)

    return RemoteReadTransfer(context, options, PLUGIN, new_reader)
