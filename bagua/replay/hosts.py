"""Emulated hosts with shaped links on one machine: a network namespace for each, and a switch. Needs root.

Every host has one full-duplex link (a veth pair, a token bucket at either end) to a bridge in a separate namespace, so
the machine's network is not changed, and removing the namespaces removes everything. Their names hold the process id,
from which a later run finds and removes the leftovers of a killed one. Addresses are 10.99.0.1, .2, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

BURST_BYTES = 512 * 1024  # size of the token bucket: bytes that an idle link carries at once
_PREFIX = "bagua-hosts"
_NETMASK_BITS = 24
_SUBNET = f"10.99.0.0/{_NETMASK_BITS}"
_MOST = 2 ** (32 - _NETMASK_BITS) - 2


def why_not() -> str | None:
    """Returns the reason why hosts cannot be made here, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1, None):
            return None
    except RuntimeError as error:
        return str(error)


def why_not_as_many(count: int, least: int = 1) -> str | None:
    """Returns the reason why that number of hosts cannot be made on any machine, or None."""
    if count < least:
        return f"{count}; expected {least} or more"
    return f"{count}; expected {_MOST} or fewer, as {_SUBNET} has addresses" if count > _MOST else None


def address(host: int) -> str:
    """Returns the address of a host; hosts count from 0."""
    return f"10.99.0.{host + 1}"


def system_congestion() -> str:
    """Returns the name of the default congestion control of TCP connections."""
    return _tcp_setting("congestion_control") or "unknown"


def available_congestions() -> list[str]:
    """Returns the names of all congestion controls of this kernel."""
    return _tcp_setting("available_congestion_control").split()


def _tcp_setting(name: str) -> str:
    try:
        return Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def hosts(count: int, rate_mbit: int | None, congestion: str = "") -> Iterator[list[list[str]]]:
    """Makes `count` hosts with links of `rate_mbit` (None: not limited); yields the prefix of a command for each.

    ``congestion`` replaces the system's default congestion control there.
    """
    _remove_left_behind()
    stem = f"{_PREFIX}-{os.getpid()}"
    switch, names = f"{stem}-switch", [f"{stem}-host{i}" for i in range(count)]
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add name bridge0 type bridge")
        _ip(f"-n {switch} link set bridge0 up")
        for i, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {switch} link add port{i} type veth peer name eth0 netns {name}")
            _ip(f"-n {switch} link set port{i} master bridge0 up")
            _ip(f"-n {name} addr add {address(i)}/{_NETMASK_BITS} dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
            if congestion:
                _ip(f"-n {name} route replace {_SUBNET} dev eth0 congctl {congestion}")
            if rate_mbit is not None:
                _shape(name, "eth0", rate_mbit)
                _shape(switch, f"port{i}", rate_mbit)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def move_to(name: str) -> None:
    """Moves this thread, and threads that it starts later, to another host.

    Args:
        name: the last word of the host's command prefix.
    """
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot move to host {name}")


def cut(names: Sequence[str], host: int, peer: int | None = None) -> None:
    """Cuts the link of a host, or only its messages to one peer. The caller may be on any host.

    Args:
        names: the names of all hosts, as for :func:`move_to`.
    """
    if peer is None:
        _ip(f"-n {names[host].rsplit('-', 1)[0]}-switch link set port{host} down")
    else:
        _ip(f"-n {names[host]} neigh replace {address(peer)} lladdr 02:00:00:00:00:77 dev eth0 nud permanent")


def _shape(namespace: str, device: str, rate_mbit: int) -> None:
    shape = f"rate {rate_mbit}mbit burst {BURST_BYTES} latency 100ms"
    _command(["ip", "netns", "exec", namespace, *f"tc qdisc replace dev {device} root tbf {shape}".split()])


def _ip(arguments: str) -> None:
    _command(["ip", *arguments.split()])


def _command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _remove_left_behind() -> None:
    """Removes the namespaces of runs whose process is no longer there."""
    folder = Path("/var/run/netns")
    for path in folder.glob(f"{_PREFIX}-*") if folder.exists() else ():
        match = re.match(rf"{_PREFIX}-(\d+)-", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)
