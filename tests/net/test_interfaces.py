"""Interfaces: what exists is listed, and the address that others can reach is chosen."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from bagua.errors import InvalidArgument
from bagua.net import interfaces
from bagua.net.interfaces import InterfaceAddress, choose_address, interface_addresses, with_scope

LO = [InterfaceAddress("lo", "127.0.0.1"), InterfaceAddress("lo", "::1")]


@pytest.fixture
def host(monkeypatch):
    """A host with these addresses, whose kernel routes everything from `source`."""

    def describe(addresses, source=None):
        monkeypatch.setattr(interfaces, "interface_addresses", lambda: addresses)
        monkeypatch.setattr(interfaces, "_source_address_towards", lambda master: source)

    return describe


def test_this_host_has_a_loopback_interface():
    found = interface_addresses()
    assert InterfaceAddress("lo", "127.0.0.1") in found
    families = [address.family for address in found]
    assert families == sorted(families, key=lambda family: family != socket.AF_INET), "IPv4 comes first"
    for address in found:
        if address.address.startswith("fe80:"):
            assert address.address.endswith(f"%{address.interface}"), "a link-local address needs its scope"


def test_the_users_interface_wins(host):
    host([*LO, InterfaceAddress("eth0", "10.0.0.7"), InterfaceAddress("ib0", "192.168.1.7")], source="10.0.0.7")
    assert choose_address("ib0", False, "10.0.0.1").address == "192.168.1.7"
    assert choose_address("lo", False, "10.0.0.1").address == "127.0.0.1"
    assert choose_address("ib0", True, "localhost").address == "192.168.1.7"


def test_the_users_choice_may_be_an_address(host):
    addresses = [*LO, InterfaceAddress("eth0", "10.0.0.7"), InterfaceAddress("eth0", "2001:db8::7")]
    host(addresses)
    assert choose_address("2001:db8::7", False, "10.0.0.1") == addresses[-1]
    assert choose_address("::1", True, "localhost") == LO[1]


def test_an_interface_that_does_not_exist_lists_the_others(host):
    host([*LO, InterfaceAddress("eth0", "10.0.0.7")])
    with pytest.raises(InvalidArgument) as caught:
        choose_address("eth1", False, "10.0.0.1")
    assert str(caught.value) == (
        "interface 'eth1' has no address on this host; there are lo (127.0.0.1), lo (::1), eth0 (10.0.0.7)"
    )


def test_on_one_host_nothing_outside_can_reach_the_listener(host):
    host([*LO, InterfaceAddress("eth0", "10.0.0.7")], source="10.0.0.7")
    assert choose_address(None, True, "10.0.0.7") == LO[0]


def test_the_route_to_the_master_decides(host):
    host([*LO, InterfaceAddress("eth0", "10.0.0.7"), InterfaceAddress("ib0", "192.168.1.7")], source="192.168.1.7")
    assert choose_address(None, False, "192.168.1.1") == InterfaceAddress("ib0", "192.168.1.7")


def test_a_master_address_that_is_loopback_says_nothing_about_the_others(host):
    """Debian names a host by 127.0.1.1 in /etc/hosts."""
    host([*LO, InterfaceAddress("eth0", "fe80::1%eth0"), InterfaceAddress("eth1", "10.0.0.7")], source="127.0.0.1")
    assert choose_address(None, False, "node0").address == "10.0.0.7"
    host([*LO, InterfaceAddress("eth0", "2001:db8::7")], source="127.0.0.1")
    assert choose_address(None, False, "node0").address == "2001:db8::7"


def test_no_address_for_others_is_an_error(host):
    host(LO, source="127.0.0.1")
    with pytest.raises(InvalidArgument, match="no address that other hosts can reach .*set BAGUA_SOCKET_IFNAME"):
        choose_address(None, False, "127.0.0.1")


def test_an_address_is_the_same_however_it_is_written(host):
    addresses = [*LO, InterfaceAddress("eth0", "2001:db8::7"), InterfaceAddress("eth0", "fe80::1%eth0")]
    host(addresses)
    assert choose_address("2001:DB8:0:0::0007", False, "10.0.0.1") == addresses[2]
    assert choose_address("FE80:0::1", False, "10.0.0.1") == choose_address("fe80::1%eth0", False, "x") == addresses[3]
    with pytest.raises(InvalidArgument, match="has no address"):
        choose_address("fe80::1%eth1", False, "10.0.0.1")


def test_of_an_interface_the_family_of_the_master_is_taken(host):
    four, link, six = (InterfaceAddress("eth0", text) for text in ("10.0.0.7", "fe80::1%eth0", "2001:db8::7"))
    host([*LO, four, link, six])
    assert choose_address("eth0", False, "2001:db8::1") == six
    assert choose_address("eth0", False, "10.0.0.1") == choose_address("eth0", False, "node0") == four
    host([*LO, link])
    assert choose_address("eth0", False, "fe80::2%eth0") == link


def test_a_link_local_address_has_each_host_s_own_scope(host):
    host([*LO, InterfaceAddress("eth0", "fe80::1%eth0")], source="fe80::1%eth0")
    own = choose_address(None, False, "fe80::2%eth0")
    assert (own.address, own.published) == ("fe80::1%eth0", "fe80::1")
    assert with_scope(own.published, "eth7") == "fe80::1%eth7"
    assert with_scope("2001:db8::7", "eth7") == "2001:db8::7" and with_scope("169.254.0.1", "eth7") == "169.254.0.1"


SECOND = """
ip link set lo up && ip link add veth0 type veth peer name veth1 || exit 77
ip addr add 10.1.2.3/24 dev veth0 && ip addr add 10.1.2.4/24 dev veth0 || exit 77
ip addr add 10.1.2.5/24 dev veth0 label veth0:x || exit 77
exec {python} -c 'import sys, types
sys.modules["bagua"] = types.ModuleType("bagua")  # without torch, whose import takes seconds
sys.modules["bagua"].__path__ = ["{package}"]
from bagua.net.interfaces import choose_address as choose
for last in 3, 4, 5: print(choose("10.1.2.%d" % last, False, "10.1.2.9").interface)'
"""


def test_further_addresses_of_an_interface():
    script = SECOND.format(python=sys.executable, package=Path(bagua.__file__).parent)
    run = subprocess.run(["unshare", "-rn", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if run.returncode in (1, 77, 127) and not run.stdout:
        pytest.skip(f"no network namespace can be made here: {run.stderr}")
    assert run.stdout == "veth0\n" * 3, run.stderr
