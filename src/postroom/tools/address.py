"""Which network addresses a tool may reach: public ones, and nothing that only looks public.

The tables are ours and not the interpreter's ``is_global``, whose answer has changed between
patch releases. Sources: the IANA special-purpose address registries for IPv4 and IPv6; the cloud
platforms' own documentation for their metadata addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_REFUSED_4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata service too
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's host agent, in the public range
        "169.254.0.0/16",  # link-local; the metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # the old 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]
# Of IPv6 only this is unicast on the Internet: loopback, local, multicast, NAT64 and the
# IPv4-compatible form lie outside it.
_INTERNET_6 = ipaddress.IPv6Network("2000::/3")
_REFUSED_6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address, which may be private, in disguise
        "3fff::/20",  # documentation
    )
]


def parse_address(text: str) -> Address | None:
    """The address a text spells in the usual way; None if it is a name. A zone id is dropped."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def is_reachable(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether a tool may connect to the address: it is public, or in a network allowed by hand.

    An IPv6 address that carries an IPv4 one (``::ffff:a.b.c.d``) is judged as that one.
    """
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _REFUSED_4)
    return address in _INTERNET_6 and not any(address in network for network in _REFUSED_6)
