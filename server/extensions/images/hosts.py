"""The hosts that pictures may be fetched from, and the network addresses that each may have.

Owns: the form of ``server.media_hosts``.  Does not know: HTTP, how a name is resolved.
"""

import ipaddress
import re
from typing import NamedTuple

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ENTRY = re.compile(
    r"(?P<host>\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
DEFAULT_PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Addresses that Python counts as public or as merely private, though none leads to another public host: those that
# stand for an IPv4 address behind a translator, those of protocols, and those where clouds keep machines' secrets.
REFUSED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24", "168.63.129.16/32", "100.100.100.200/32", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48",
        "3fff::/20", "5f00::/16", "fec0::/10", "fd00:ec2::254/128", "fd20:ce::254/128",
    )
)  # fmt: skip
LOW_32 = (1 << 32) - 1


class AllowedHost(NamedTuple):
    """An entry.  name: of a host, an address, or '*' and a domain.  port: None for that of the scheme."""

    name: str
    port: int | None

    @classmethod
    def read(cls, given: str) -> "AllowedHost | None":
        """Return an entry; None for what is none."""
        if (found := ENTRY.fullmatch(given.lower())) is None:
            return None
        name, port = found["host"].strip("[]"), found["port"]
        if given.startswith("[") and address_of(name) is None:
            return None
        if port is not None and not 1 <= int(port) <= 65535:
            return None
        return cls(name, None if port is None else int(port))

    def covers(self, scheme: str, host: str, port: int) -> bool:
        """Whether a host may be asked at a port."""
        if port != (self.port or DEFAULT_PORTS.get(scheme)):
            return False
        if self.name.startswith("*"):
            return host.endswith(self.name[1:])
        return host == self.name

    def may_be_at(self, address: Address) -> bool:
        """Whether the host may have an address.

        A host behind a '*' must have a public one.  One that is named may have a private one, but none where machines
        of a cloud find their secrets, as link-local ones are: that must be named itself."""
        address = _behind(address)
        if (named := address_of(self.name)) is not None:
            return _behind(named) == address
        if address.is_multicast or any(address in network for network in REFUSED):
            return False
        special = address.is_link_local or address.is_unspecified or address.is_reserved
        return address.is_global or not (self.name.startswith("*") or special)


def address_of(host: str) -> Address | None:
    """Return a host as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _behind(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, where it does for one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & LOW_32)
    return address.ipv4_mapped or address.sixtofour or address
