"""Which congestion control data connections get: by name, the system's, or what "auto" takes near by."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

import bagua
from bagua.config import settings
from bagua.errors import InvalidArgument
from bagua.net import congestion
from bagua.net.interfaces import InterfaceAddress, interface_addresses
from bagua.net.links import Endpoint
from bagua.testing import spawn
from tests.distributed.worlds import in_turns


def control_of(sock):
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def set_control(sock, name):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def usable():
    """Names that this process may choose: cubic and reno on most systems."""
    names = []
    for name in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        with socket.socket() as probe:
            try:
                set_control(probe, name)
            except PermissionError:
                continue
            names.append(name)
    return names


@pytest.fixture
def two_names():
    names = usable()
    if len(names) < 2:
        pytest.skip(f"this kernel offers only {names}")
    return names[:2]


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with dialed, accepted:
        yield dialed, accepted


def test_auto_takes_another_for_one_that_pauses(connection, two_names, monkeypatch):
    pausing, other = two_names
    monkeypatch.setattr(congestion, "_PAUSING", (pausing,))
    monkeypatch.setattr(congestion, "_LOSS_BASED", ("not-loaded", other))
    for sock in connection:
        set_control(sock, pausing)
        congestion.choose(sock, "system")
        assert control_of(sock) == pausing
        congestion.choose(sock, "auto")
        assert control_of(sock) == other, "the first that may be used"


def test_what_auto_does_is_logged(connection, two_names, monkeypatch, caplog):
    caplog.set_level("INFO", logger="bagua")
    pausing, other = two_names
    monkeypatch.setattr(congestion, "_PAUSING", (pausing,))
    set_control(connection[0], pausing)
    monkeypatch.setattr(congestion, "_LOSS_BASED", ("not-loaded",))
    congestion.choose(connection[0], "auto")
    assert control_of(connection[0]) == pausing
    assert f"a connection keeps {pausing}: none of not-loaded may be used here" in caplog.text
    monkeypatch.setattr(congestion, "_LOSS_BASED", (other,))
    congestion.choose(connection[0], "auto")
    assert f"a connection to a near host uses {other} instead of {pausing}" in caplog.text


def test_auto_leaves_one_that_does_not_pause(connection, two_names, monkeypatch):
    monkeypatch.setattr(congestion, "_PAUSING", ("bbr-of-another-name",))
    for sock, name in zip(connection, two_names, strict=True):
        set_control(sock, name)
        congestion.choose(sock, "auto")
        assert control_of(sock) == name


def test_auto_leaves_far_peers_alone(connection, two_names, monkeypatch):
    """The round trip is the kernel's, of the handshake; on the loopback it is some microseconds."""
    pausing, other = two_names
    monkeypatch.setattr(congestion, "_PAUSING", (pausing,))
    monkeypatch.setattr(congestion, "_LOSS_BASED", (other,))
    for sock in connection:
        set_control(sock, pausing)
        monkeypatch.setattr(congestion, "_NEAR_S", 1e-6)
        congestion.choose(sock, "auto")
        assert control_of(sock) == pausing
        monkeypatch.setattr(congestion, "_NEAR_S", 0.005)
        congestion.choose(sock, "auto")
        assert control_of(sock) == other


def test_bbr_is_what_pauses(connection):
    if "bbr" not in usable():
        pytest.skip("this kernel has no bbr, or keeps it for the privileged")
    sock = connection[0]
    set_control(sock, "bbr")
    congestion.choose(sock, "auto")
    assert control_of(sock) in ("cubic", "reno")


def test_a_name_is_taken(connection, two_names):
    for name in two_names:
        congestion.choose(connection[0], name)
        assert control_of(connection[0]) == name


def test_auto_where_the_kernel_cannot_say(caplog):
    caplog.set_level("INFO", logger="bagua")
    ours, theirs = socket.socketpair()  # without any of TCP's options
    with ours, theirs:
        congestion.choose(ours, "auto")
    assert "a connection keeps the system's congestion control, whose name or round trip is unknown" in caplog.text


def test_description(two_names, monkeypatch):
    with socket.socket() as probe:
        of_system = control_of(probe)
    assert congestion.describe("system") == of_system
    assert congestion.describe("a-name") == "a-name"
    monkeypatch.setattr(congestion, "_PAUSING", ("bbr-of-another-name",))
    assert congestion.describe("auto") == of_system
    monkeypatch.setattr(congestion, "_PAUSING", (of_system,))
    monkeypatch.setattr(congestion, "_LOSS_BASED", two_names[:1])
    assert congestion.describe("auto") == f"{two_names[0]} to hosts within 5 ms, {of_system} to others"


def test_what_the_kernel_does_not_have_is_refused_before_anybody_connects():
    message = (
        r"BAGUA_TCP_CONGESTION='not-loaded' cannot be used on this host: its kernel has .*reno.*; `modprobe "
        r"tcp_not-loaded`, as root, may add it; 'system' keeps its default"
    )
    with pytest.raises(InvalidArgument, match=message):
        Endpoint(settings({"BAGUA_TCP_CONGESTION": "not-loaded"}), InterfaceAddress("lo", "127.0.0.1"))
    for chosen in ("auto", "system", *usable()):
        congestion.check(chosen)


def test_what_is_kept_for_the_privileged_is_refused(monkeypatch):
    def refuse(sock, name):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(congestion, "_set", refuse)
    message = (
        r"BAGUA_TCP_CONGESTION='bbr' cannot be used on this host: Operation not permitted: every process may use .*; "
        r"root can add it to net.ipv4.tcp_allowed_congestion_control; 'system' keeps"
    )
    with pytest.raises(InvalidArgument, match=message):
        congestion.check("bbr")


def test_a_connection_whose_route_forbids_the_choice_keeps_its_own(connection, caplog):
    before = control_of(connection[0])
    congestion.choose(connection[0], "not-loaded")
    assert control_of(connection[0]) == before
    assert "a connection does not accept BAGUA_TCP_CONGESTION=not-loaded and keeps its default" in caplog.text


@in_turns("setting, address", ["auto", "a name"], ["127.0.0.1", "::1"])
def test_all_data_connections_have_it_and_no_other(two_names, address, setting):
    """Two imitated hosts with three streams: what every rank's established connections use."""
    if address == "::1" and not any(here.address == address for here in interface_addresses()):
        pytest.skip("this host has no IPv6")
    with socket.socket() as probe:
        of_system = control_of(probe)
    chosen = next(name for name in two_names if name != of_system)
    env = {"BAGUA_TCP_STREAMS": "3", "BAGUA_SOCKET_IFNAME": address}
    if setting != "auto":
        env["BAGUA_TCP_CONGESTION"] = chosen
    for controls in spawn(controls_of_connections, 2, nodes=[1, 1], env=env, args=(of_system, chosen)):
        assert controls.count(chosen) == 3, controls
        assert set(controls) == {chosen, of_system}, "the control link's and the store's are the system's"


def controls_of_connections(rank, world_size, of_system, chosen):
    import torch

    congestion._PAUSING, congestion._LOSS_BASED = (of_system,), (chosen,)
    bagua.init_process_group()
    bagua.all_reduce(torch.ones(100_000))
    controls = controls_of_my_sockets()
    bagua.destroy_process_group()
    return controls


def controls_of_my_sockets():
    """One per connected TCP socket of this process."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(entry)).st_mode)
        except OSError:
            continue  # the listing's own
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(entry))) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                try:
                    sock.getpeername()
                except OSError:
                    continue
                found.append(control_of(sock))
    return found
