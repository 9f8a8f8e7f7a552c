"""Network interfaces of this host, and the address at which other hosts should reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from bagua.errors import InvalidArgument

__all__ = ["InterfaceAddress", "choose_address", "interface_addresses"]

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class InterfaceAddress:
    """One address of one interface; IPv6 link-local ones carry their scope ("fe80::1%eth0")."""

    interface: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def interface_addresses() -> list[InterfaceAddress]:
    """All addresses of this host, IPv4 before IPv6, in the kernel's order of interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # no IPv4 address
            found.append(InterfaceAddress(name, socket.inet_ntoa(answer[20:24])))
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
        interface: the user's choice, which wins: an interface ("eth0") or one of its addresses.
        single_host: whether all ranks are on this host; then no other host can reach the listener.
        master_addr: otherwise, the interface of the route to this host is taken.

    Raises:
        InvalidArgument: no such interface, or it has no address; the existing ones are listed.
    """
    addresses = interface_addresses()
    if interface is not None:
        for candidate in addresses:
            if interface in (candidate.interface, candidate.address):
                return candidate
        listing = ", ".join(f"{a.interface} ({a.address})" for a in addresses)
        raise InvalidArgument(f"interface {interface!r} has no address on this host; there are {listing}")
    if single_host:
        return InterfaceAddress("lo", "127.0.0.1")
    routed = _source_address_towards(master_addr)
    if routed is not None and not ipaddress.ip_address(routed.split("%")[0]).is_loopback:
        names = [a.interface for a in addresses if a.address.split("%")[0] == routed.split("%")[0]]
        return InterfaceAddress(names[0] if names else "?", routed)
    # MASTER_ADDR names this host by a loopback address, which is useless to the other hosts.
    for candidate in addresses:
        ip = ipaddress.ip_address(candidate.address.split("%")[0])
        if not ip.is_loopback and not ip.is_link_local:
            return candidate
    raise InvalidArgument(
        f"this host has no address that other hosts can reach (MASTER_ADDR is {master_addr}); "
        "set BAGUA_SOCKET_IFNAME to the interface to use"
    )


def _source_address_towards(host: str) -> str | None:
    """The local address that the kernel would use to talk to `host`; no packet is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None
