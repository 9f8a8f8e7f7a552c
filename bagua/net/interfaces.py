"""Network interfaces of this host, and the address at which other hosts should reach it."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from bagua.errors import InvalidArgument

__all__ = ["InterfaceAddress", "choose_address", "interface_addresses", "with_scope"]

_SIOCGIFCONF = 0x8912  # all IPv4 addresses, into memory of the caller's
_IFREQ = struct.Struct("16s4x4s16x")  # the label, and of a sockaddr_in of 16 bytes in 24 the address
_MAX_ADDRESSES = 4096


@dataclass(frozen=True)
class InterfaceAddress:
    """One address of one interface; IPv6 link-local ones carry their scope ("fe80::1%eth0")."""

    interface: str
    address: str

    @property
    def published(self) -> str:
        """The address without the scope, which is this host's own name of the interface."""
        return self.address.partition("%")[0]

    @property
    def is_link_local(self) -> bool:
        """True if only hosts of the same link reach it."""
        return ipaddress.ip_address(self.address).is_link_local

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def interface_addresses() -> list[InterfaceAddress]:
    """All addresses of this host, IPv4 before IPv6, in the kernel's order of interfaces."""
    memory = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(memory), memory.buffer_info()[0]))
    used = struct.unpack("iP", answer)[0]
    found = []
    for label, address in _IFREQ.iter_unpack(memory[:used].tobytes()):
        name = label.rstrip(b"\0").decode(errors="surrogateescape").partition(":")[0]  # "eth0:1" of a second one
        found.append(InterfaceAddress(name, socket.inet_ntoa(address)))
    return found + _ipv6_addresses()


def _ipv6_addresses() -> list[InterfaceAddress]:
    try:
        with open("/proc/net/if_inet6") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        text = f"{address}%{name}" if address.is_link_local else str(address)
        found.append(InterfaceAddress(name, text))
    return found


def choose_address(interface: str | None, single_host: bool, master_addr: str) -> InterfaceAddress:
    """The address on which this rank listens, and that the others use.

    Args:
        interface: the user's choice, which wins: an interface ("eth0"), of which an address of master_addr's family is
            taken, or one of its addresses.
        single_host: whether all ranks are on this host; then no other host can reach the listener.
        master_addr: otherwise, the interface of the route to this host is taken.

    Raises:
        InvalidArgument: no such interface, or it has no address; the existing ones are listed.
    """
    addresses = interface_addresses()
    if interface is not None:
        is_ipv6 = ":" in master_addr
        # An interface may have several: the family in which the ranks meet comes first, and link-local ones last.
        for candidate in sorted(
            addresses, key=lambda it: (it.is_link_local, (it.family == socket.AF_INET6) != is_ipv6)
        ):
            if interface == candidate.interface or _is_same(interface, candidate.address):
                return candidate
        listing = ", ".join(f"{a.interface} ({a.address})" for a in addresses)
        raise InvalidArgument(f"interface {interface!r} has no address on this host; there are {listing}")
    if single_host:
        return InterfaceAddress("lo", "127.0.0.1")
    routed = _source_address_towards(master_addr)
    if routed is not None and not ipaddress.ip_address(routed).is_loopback:
        names = [a.interface for a in addresses if _is_same(routed, a.address)]
        return InterfaceAddress(names[0] if names else "?", routed)
    # MASTER_ADDR names this host by a loopback address, which is useless to the other hosts.
    for candidate in addresses:
        if not ipaddress.ip_address(candidate.address).is_loopback and not candidate.is_link_local:
            return candidate
    raise InvalidArgument(
        f"this host has no address that other hosts can reach (MASTER_ADDR is {master_addr}); "
        "set BAGUA_SOCKET_IFNAME to the interface to use"
    )


def _is_same(given: str, address: str) -> bool:
    """True if `given` is that address, however it is written; one without a scope is that of any interface."""
    try:
        one, other = ipaddress.ip_address(given), ipaddress.ip_address(address)
    except ValueError:
        return False
    return one == (other if "%" in given else ipaddress.ip_address(address.partition("%")[0]))


def with_scope(address: str, interface: str) -> str:
    """A rank's published address as this host reaches it: a link-local one through `interface`."""
    return f"{address}%{interface}" if ipaddress.ip_address(address).is_link_local and ":" in address else address


def _source_address_towards(host: str) -> str | None:
    """The local address that the kernel would use to talk to `host`; no packet is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = probe.getsockname()
    except OSError:
        return None
    if family == socket.AF_INET6 and own[3] != 0:
        return f"{own[0].partition('%')[0]}%{socket.if_indextoname(own[3])}"
    return str(own[0])
