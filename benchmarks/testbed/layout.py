"""What a testbed consists of: a hub, ports on it, token buckets; from profiles to the commands of `ip` and `tc`.

Pure: nothing here runs a command. The hub is a bridge in a namespace of its own. The server and every device have a
namespace with one link to it. A device's upload is limited where packets leave the device, its download where they
leave the hub, so what one device sends another passes the upload limit of the first and the download limit of the
second. Devices on one medium pass, both ways, one more bucket that all of them share: their hub ports redirect every
packet through one `ifb` interface. As on Wi-Fi with an access point, traffic between two of them takes the medium
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from cleave.core.fleet.profiles import Profiles
from cleave.errors import CleaveError

SERVER: Final = "server"
"""The name of the server's place; no device may have it."""
MOST_DEVICES: Final = 1000
"""A Linux bridge has 1,024 ports."""
PACKET_BYTES: Final = 1514
"""A full Ethernet frame. Of these, 1,448 are a TCP stream's own."""
PAYLOAD_SHARE: Final = 1448 / PACKET_BYTES
_BURST_PACKETS: Final = 4
_BURST_S: Final = 4e-3
"""A bucket holds what passes in this time: less, and links come out too slow whenever the kernel's timer wakes late. On
two busy cores 1 ms cost up to 15 % of a link's rate, 4 ms at most 1 %; 40 Mbit/s then let 20 kB through at once."""
_QUEUE_S: Final = 0.05
"""A queue holds what the link sends in this time, and at least as much as keeps a TCP stream going."""
_QUEUE_PACKETS: Final = 48
_NETWORK: Final = "10.77"


class TestbedError(CleaveError):
    """A testbed cannot be built or used here."""

    __test__ = False  # not a test, whatever pytest thinks of its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A token bucket: `tc tbf` with a small burst, so that short transfers are limited as long ones are."""

    bytes_per_s: float

    @property
    def burst_bytes(self) -> int:
        return max(_BURST_PACKETS * PACKET_BYTES, ceil(self.bytes_per_s * _BURST_S))

    @property
    def queue_bytes(self) -> int:
        return max(_QUEUE_PACKETS * PACKET_BYTES, ceil(self.bytes_per_s * _QUEUE_S)) + self.burst_bytes

    @property
    def words(self) -> str:
        bits = max(8, round(self.bytes_per_s * 8))
        return f"tbf rate {bits}bit burst {self.burst_bytes} limit {self.queue_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A device's place on the hub."""

    name: str
    namespace: str
    interface: str
    """The hub's end of the link; the other end is eth0."""
    address: str
    down: Bucket
    up: Bucket
    medium: str = ""
    """The interface of the hub that all packets of this port pass; empty for a link of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All names, addresses and limits of one testbed."""

    hub: str
    server: str
    ports: tuple[Port, ...]
    media: dict[str, Bucket]

    @property
    def namespaces(self) -> tuple[str, ...]:
        return self.hub, self.server, *(port.namespace for port in self.ports)

    def namespace(self, place: str) -> str:
        return self.server if place == SERVER else self._port(place).namespace

    def address(self, place: str) -> str:
        return f"{_NETWORK}.0.1" if place == SERVER else self._port(place).address

    def _port(self, place: str) -> Port:
        for port in self.ports:
            if port.name == place:
                return port
        known = ", ".join(port.name for port in self.ports)
        raise TestbedError(f"expected {SERVER} or one of {known}, got {place!r}; name one of them")


def layout_of(profiles: Profiles, prefix: str) -> Layout:
    """Lay out a testbed whose namespaces all start with `prefix`."""
    if len(profiles) > MOST_DEVICES:
        raise TestbedError(
            f"expected at most {MOST_DEVICES:,} devices, the ports of one bridge, got {len(profiles):,}; "
            "take fewer, or emulate them"
        )
    media: dict[str, Bucket] = {}
    interfaces: dict[str, str] = {}
    capacities: list[float] = profiles.medium_bytes_per_s.tolist()
    for name, capacity in zip(profiles.medium, capacities, strict=True):
        if name and name not in interfaces:
            interfaces[name] = f"medium{len(interfaces)}"
            media[interfaces[name]] = Bucket(bytes_per_s=capacity)
    downs: list[float] = profiles.down_bytes_per_s.tolist()
    ups: list[float] = profiles.up_bytes_per_s.tolist()
    ports = tuple(
        Port(
            name=name,
            namespace=f"{prefix}{number}",
            interface=f"port{number}",
            address=f"{_NETWORK}.{1 + number // 250}.{1 + number % 250}",
            down=Bucket(bytes_per_s=down),
            up=Bucket(bytes_per_s=up),
            medium=interfaces.get(medium, ""),
        )
        for number, (name, down, up, medium) in enumerate(zip(profiles.names, downs, ups, profiles.medium, strict=True))
    )
    return Layout(hub=f"{prefix}hub", server=f"{prefix}server", ports=ports, media=media)


Batch = tuple[tuple[str, ...], Sequence[str]]
"""The command that reads a batch, and its lines."""


def batches_of(layout: Layout) -> list[Batch]:
    """List what `ip` and `tc` have to do, in order."""
    links = [("server", layout.server, layout.address(SERVER))]
    links += [(port.interface, port.namespace, port.address) for port in layout.ports]
    hub = [
        "link add bridge type bridge",
        "link set bridge up",
        *(line for medium in layout.media for line in (f"link add {medium} type ifb", f"link set {medium} up")),
        *(f"link add {interface} type veth peer name eth0 netns {namespace}" for interface, namespace, _ in links),
        *(f"link set {interface} addrgenmode none master bridge up" for interface, _, _ in links),
    ]
    limits = [f"qdisc replace dev {medium} root {bucket.words}" for medium, bucket in layout.media.items()]
    for port in layout.ports:
        limits.append(f"qdisc replace dev {port.interface} root {port.down.words}")
        if port.medium:
            limits.append(f"qdisc add dev {port.interface} clsact")
            limits += [
                f"filter add dev {port.interface} {way} protocol all u32 match u32 0 0 "
                f"action mirred egress redirect dev {port.medium}"
                for way in ("ingress", "egress")
            ]
    made: list[Batch] = [
        (("ip",), [f"netns add {namespace}" for namespace in layout.namespaces]),
        (("ip", "-n", layout.hub), hub),
        (("tc", "-n", layout.hub), limits),
    ]
    # There is no default route: a name that only a resolver knows must fail at once, not after its timeouts.
    for _, namespace, address in links:
        own = [
            "link set lo up",
            "link set eth0 addrgenmode none",
            f"address add {address}/16 dev eth0",
            "link set eth0 up",
        ]
        made.append((("ip", "-n", namespace), own))
    made += [(("tc", "-n", port.namespace), [f"qdisc replace dev eth0 root {port.up.words}"]) for port in layout.ports]
    return made
