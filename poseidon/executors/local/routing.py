"""What this machine's own network looks like, by the kernel and its files. IPv4 alone, as that is what runners get."""

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise
from pathlib import Path

ADDRESSES = Path("/proc/net/fib_trie")
ROUTES = Path("/proc/net/route")
ANYTHING = IPv4Network("0.0.0.0/0")


def own_networks(trie: Path = ADDRESSES) -> set[IPv4Network]:
    """All addresses by which this machine reaches itself, 127.0.0.0/8 among them."""
    found = {IPv4Network("127.0.0.0/8")}
    for before, line in pairwise(trie.read_text().splitlines()):
        words = line.split()
        if words[1:] == ["host", "LOCAL"]:
            found.add(IPv4Network(before.split()[-1] + words[0], strict=False))
    return found


def known_networks(routes: Path = ROUTES) -> set[IPv4Network]:
    """The networks that this machine has routes for, but for the default one."""
    found = set()
    for line in routes.read_text().splitlines()[1:]:
        fields = line.split()
        base, mask = (IPv4Address(bytes.fromhex(fields[index])[::-1]) for index in (1, 7))
        found.add(IPv4Network(f"{base}/{mask}"))
    return found - {ANYTHING}


def free_subnet(candidates: Sequence[str], taken: Sequence[IPv4Address]) -> str:
    """The first that this machine doesn't know, and that has none of the addresses *taken*."""
    known = known_networks()
    for candidate in candidates:
        network = IPv4Network(candidate)
        if not any(network.overlaps(other) for other in known) and not any(address in network for address in taken):
            return candidate
    return candidates[0]


def resolvers_of(path: Path) -> list[IPv4Address]:
    """The name servers that a resolv.conf names."""
    found = []
    with suppress(OSError):
        for words in (line.split() for line in path.read_text(errors="replace").splitlines()):
            if words[:1] == ["nameserver"]:
                with suppress(ValueError):
                    found.append(IPv4Address(words[1] if len(words) > 1 else ""))
    return found


def without(network: IPv4Network, address: IPv4Address) -> Iterator[IPv4Network]:
    """*network*, but for one address."""
    return network.address_exclude(IPv4Network(address)) if address in network else iter([network])


def smallest(networks: Iterator[IPv4Network] | Sequence[IPv4Network]) -> tuple[str, ...]:
    """The same addresses by as few networks as possible, as text."""
    return tuple(str(network) for network in ipaddress.collapse_addresses(networks))
