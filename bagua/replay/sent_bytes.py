"""How many bytes this host has sent to others, on the interface that BAGUA_SOCKET_IFNAME chooses, or on all but lo.

Beside the data path: read from the kernel before and after steps, so that DDP's bytes are counted as bagua's are.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess

from bagua import config
from bagua.errors import InvalidArgument

_SIOCGIFADDR = 0x8915


def sent_bytes() -> int:
    """Bytes that this host has sent to others so far.

    As its token bucket counts them, where it has one: every packet with its headers. An interface's own count has
    those of a train of packets, which the kernel cuts later, once.

    Raises:
        InvalidArgument: as `interface_of`.
    """
    chosen = config.settings().interface
    if chosen is not None:
        chosen = interface_of(chosen)
    if chosen is not None and shutil.which("tc") is not None:
        shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", chosen], capture_output=True, check=True)
        buckets = [qdisc for qdisc in json.loads(shown.stdout) if qdisc["kind"] == "tbf"]
        if buckets:
            return buckets[0]["bytes"]
    total = 0
    with open("/proc/net/dev") as file:
        for line in file.readlines()[2:]:
            interface, _, counts = line.partition(":")
            if interface.strip() == chosen or (chosen is None and interface.strip() != "lo"):
                total += int(counts.split()[8])
    return total


def interface_of(chosen: str) -> str:
    """The name of the interface that ``chosen`` names, by itself or by one of its addresses.

    Raises:
        InvalidArgument: this host has neither such an interface nor such an address; those that it has are listed.
    """
    names = [name for _, name in socket.if_nameindex()]
    if chosen in names:
        return chosen
    addresses = _addresses(names)
    text, _, scope = chosen.partition("%")  # as in fe80::1%eth0
    try:
        wanted = ipaddress.ip_address(text)
        return next(name for name, address in addresses if address == wanted and scope in ("", name))
    except (ValueError, StopIteration):
        listing = ", ".join([*names, *(f"{address} ({name})" for name, address in addresses)])
        raise InvalidArgument(
            f"BAGUA_SOCKET_IFNAME={chosen!r} is no interface of this host and no address of one, so that its bytes "
            f"cannot be counted; there are {listing}"
        ) from None


def _addresses(names: list[str]) -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Interfaces with their addresses: the first of IPv4, which is the one that bagua takes, and all of IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # no IPv4 address
            found.append((name, ipaddress.ip_address(answer[20:24])))
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as file:
            for digits, *_, name in map(str.split, file):
                found.append((name, ipaddress.ip_address(bytes.fromhex(digits))))
    return found
