"""Counts the bytes that this host has sent to others, on the interface BAGUA_SOCKET_IFNAME, or on all but lo.

The counters are the kernel's, so that DDP's bytes are counted as bagua's are.
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
    """Returns the bytes that this host has sent to others so far.

    If the interface has a token bucket, its counter is used, which includes the headers of every packet. The
    interface's own counter includes the headers of a packet once that the kernel splits into several later.

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
    """Returns the name of the interface ``chosen``, given by its name or one of its addresses.

    Raises:
        InvalidArgument: this host has no such interface and no such address; the message lists those that it has.
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
            f"BAGUA_SOCKET_IFNAME={chosen!r} is no interface of this host and no address of one, so its bytes "
            f"cannot be counted; choose one of {listing}"
        ) from None


def _addresses(names: list[str]) -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Returns interfaces with their addresses: the first IPv4 address, which bagua uses, and all IPv6 ones."""
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
