"""The congestion control that TCP uses on the data connections between hosts (tcp(7), TCP_CONGESTION).

The system's default, unless that is BBR and the peer is near: then a loss-based one. About every ten seconds BBR
throttles a busy connection for 200 ms, to measure its shortest round trip (ProbeRTT in Cardwell et al., "BBR:
Congestion-Based Congestion Control", ACM Queue 14(5), 2016). Hosts do so at different times, and a collective waits for
the slowest, so their pauses add up (benchmarks/micro/congestion.py measures them). To distant peers BBR stays: there a
lost packet says little about the network's load and slows a loss-based control down for long. The kernel goes on pacing
the packets of a connection that began with BBR.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from pathlib import Path

from bagua.errors import InvalidArgument

__all__ = ["AUTO", "SYSTEM", "check", "choose", "describe"]

logger = logging.getLogger("bagua")

AUTO, SYSTEM = "auto", "system"

_PAUSING = ("bbr",)
_LOSS_BASED = ("cubic", "reno")  # the first that this process may use; every process may use reno unless forbidden
_NEAR_S = 0.005  # round trip: one site, or two of one region
_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_MIN_RTT_OFFSET = 148  # of tcpi_min_rtt in struct tcp_info; microseconds


def check(chosen: str) -> None:
    """Check that this process may use the congestion control that BAGUA_TCP_CONGESTION names.

    Raises:
        InvalidArgument: the kernel does not have it, or only privileged processes may use it; the message names those
            that it has, and what to do.
    """
    if chosen in (AUTO, SYSTEM):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            _set(probe, chosen)
        except OSError as error:
            if error.errno == errno.ENOENT:
                why = f"its kernel has {_listed('available')}; `modprobe tcp_{chosen}`, as root, may add it"
            else:
                why = (
                    f"{error.strerror}: every process may use {_listed('allowed')}; root can add it to "
                    "net.ipv4.tcp_allowed_congestion_control"
                )
            raise InvalidArgument(
                f"BAGUA_TCP_CONGESTION={chosen!r} cannot be used on this host: {why}; {SYSTEM!r} keeps its default"
            ) from None


def choose(sock: socket.socket, chosen: str) -> None:
    """Set the congestion control of a connected data socket: ``chosen`` is a checked name, "auto" or "system".

    A route may forbid what the host allows (`ip route ... congctl lock`): then the route's stays, with a warning.
    """
    if chosen == SYSTEM:
        return
    if chosen != AUTO:
        if not _set_first(sock, (chosen,)):
            logger.warning("a connection does not accept BAGUA_TCP_CONGESTION=%s and keeps its default", chosen)
        return
    try:
        of_system = _name_of(sock)
        if of_system in _PAUSING and _round_trip_s(sock) < _NEAR_S:
            if _set_first(sock, _LOSS_BASED):
                logger.info("a connection to a near host uses %s instead of %s", _name_of(sock), of_system)
            else:
                logger.info("a connection keeps %s: none of %s may be used here", of_system, ", ".join(_LOSS_BASED))
    except OSError as error:  # a kernel without these options
        logger.info(
            "a connection keeps the system's congestion control, whose name or round trip is unknown: %s", error
        )


def describe(chosen: str) -> str:
    """Returns a sentence on the effect of ``choose`` in this process."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            of_system = _name_of(probe)
            if chosen == AUTO and of_system in _PAUSING and _set_first(probe, _LOSS_BASED):
                return f"{_name_of(probe)} to hosts within {_NEAR_S * 1e3:g} ms, {of_system} to others"
        except OSError:
            of_system = "unknown"
    return of_system if chosen in (AUTO, SYSTEM) else chosen


def _set(sock: socket.socket, name: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def _set_first(sock: socket.socket, names: tuple[str, ...]) -> bool:
    for name in names:
        try:
            _set(sock, name)
            return True
        except OSError:
            continue
    return False


def _name_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()


def _round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip that the kernel has measured on a connection; at least TCP's handshake was one."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_OFFSET + 4)
    if len(info) < _MIN_RTT_OFFSET + 4:
        raise OSError("this kernel's tcp_info has no tcpi_min_rtt")  # before Linux 4.6
    return struct.unpack_from("<I", info, _MIN_RTT_OFFSET)[0] * 1e-6


def _listed(kind: str) -> str:
    try:
        return Path(f"/proc/sys/net/ipv4/tcp_{kind}_congestion_control").read_text().strip()
    except OSError:
        return "not known"
