"""Which addresses count as public: none of private networks."""

import ipaddress

import pytest

from quintet.media.fetch.addresses import is_public, resolve_host

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450:4001:81b::200e"]
NOT_PUBLIC = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "192.88.99.1",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "ff02::1", "fec0::1", "2001:db8::1", "3fff::1",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::",
    "2001:0:4136:e378::1", "100::1",
    "", "localhost", "0x7f000001", "2130706433", "127.1", "8.8.8.8 ", "8.8.8.8%eth0",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_other_networks_and_other_text_are_not(address: str) -> None:
    assert not is_public(address)


def test_no_ipv6_form_of_a_private_ipv4_address_is_public() -> None:
    """Each way to write an IPv4 address within one of IPv6, of each private network."""
    for private in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1"):
        number = int(ipaddress.IPv4Address(private))
        forms = [number, 0xFFFF << 32 | number, 0xFFFF0000 << 32 | number, 0x2002 << 112 | number << 80,
                 0x64FF9B << 96 | number, 0x64FF9B0001 << 80 | number,
                 0x20010000 << 96 | (number ^ 0xFFFFFFFF)]  # fmt: skip
        for form in forms:
            assert not is_public(str(ipaddress.IPv6Address(form))), ipaddress.IPv6Address(form)


def test_a_number_resolves_to_itself_and_no_name_waits_for_ever() -> None:
    assert list(resolve_host("127.0.0.1", 80, 10.0)) == ["127.0.0.1"]
    with pytest.raises(OSError):
        resolve_host("no such host", 80, 10.0)
