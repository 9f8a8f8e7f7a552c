"""A replay counts the bytes of the interface BAGUA_SOCKET_IFNAME, given by its name or an address."""

import ipaddress
import shutil
import socket

import pytest

import bagua
from bagua.replay import sent_bytes


@pytest.mark.parametrize("chosen", ["lo", "127.0.0.1"])
def test_an_interface_is_chosen_by_name_or_address(chosen):
    assert sent_bytes.interface_of(chosen) == "lo"


def test_an_address_of_ipv6(monkeypatch):
    pairs = (("a", "fe80::1"), ("b", "fe80::1"), ("c", "::2"))
    addresses = [(name, ipaddress.ip_address(text)) for name, text in pairs]
    monkeypatch.setattr(sent_bytes, "_addresses", lambda names: addresses)
    assert [sent_bytes.interface_of(text) for text in ("fe80::1%a", "fe80::1%b", "0::2")] == ["a", "b", "c"]


@pytest.mark.parametrize("chosen", ["no_such0", "192.0.2.1"])
def test_what_is_no_interface_of_this_host(chosen, monkeypatch):
    monkeypatch.setenv("BAGUA_SOCKET_IFNAME", chosen)
    with pytest.raises(bagua.InvalidArgument, match=rf"BAGUA_SOCKET_IFNAME='{chosen}' is no .* choose one of .*\(lo\)"):
        sent_bytes.sent_bytes()


@pytest.mark.parametrize(("chosen", "has_tc"), [("lo", True), ("127.0.0.1", False)])
def test_bytes_of_a_chosen_address_are_counted(chosen, has_tc, monkeypatch):
    if has_tc and shutil.which("tc") is None:
        pytest.skip("tc is not found")
    if not has_tc:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("BAGUA_SOCKET_IFNAME", chosen)
    before = sent_bytes.sent_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(10):
            sender.sendto(bytes(1000), ("127.0.0.1", 9))
    assert sent_bytes.sent_bytes() - before >= 10_000
