"""Tell links that devices share from links of their own, by how traffic on one slows down the others.

Every tick gives a window: the bytes that each device moved down and up, and in which directions bytes waited all the
time. Such a direction was full, and what it carried says what limits it. A link of its own carries the same whatever
others do. On a shared line, what all devices carry in that direction stays the same; on a medium such as a Wi-Fi
network, what all of them carry in both directions together. So the explanation is the sum that stays the same while
its parts vary. Where traffic never varies, nothing is claimed, and nothing needs to be: plans then see the rates at
which links ran.

Devices with one public address, or in one private network, are looked at first, then all together: what the whole
fleet shares although its devices are in several networks is the server's own link. Pure: the caller has the clock.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from cleave.core.fleet.profiles import Bools, Floats, Ints

_WINDOWS = 128
"""Latest windows that count."""
_FULL = 0.9
"""Share of a window in which bytes must wait for a direction to count as full."""
_LEAST_S, _MOST_S = 0.02, 1.0
"""Windows of other lengths say little: timers were late, or nothing was sampled in between."""
_FEW = 12
"""Samples of full directions that a claim needs."""
_VARIES, _STEADY = 0.05, 0.1
"""Mean deviation from the median, relative to it, of rates that vary and of a sum that stays the same."""
_YIELDS = 0.6
"""Bytes that a link carries less for every byte that the others carry more: 1 if it is shared, 0 if not."""
_EXCEEDED = 1.25
"""Traffic over capacity that disproves a claim."""
_SAME = 0.1
"""Relative change of a capacity that does not matter."""
_CROSSING = 0.2
"""Share of traffic the other way at which a window tells a medium from a line."""


class Carried(NamedTuple):
    """Traffic of a device so far."""

    down_bytes: int
    down_s: float
    """Seconds in which bytes waited all the time; the same below."""
    up_bytes: int
    up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """A link that several devices share; or the two directions of one device's link, if one carries both."""

    devices: frozenset[str]
    down_bytes_per_s: float
    """Infinite where nothing is known; the same below."""
    up_bytes_per_s: float
    is_medium: bool
    """Whether both directions share the capacity, as on a Wi-Fi network; both rates are the whole of it then."""
    is_servers: bool
    """Whether it is the server's own: devices of several networks share it."""

    def __str__(self) -> str:
        if self.is_servers:
            who = "the server's own link carries"
        elif len(self.devices) == 1:
            (name,) = self.devices
            who = f"the link of {name} carries"
        else:
            names = sorted(self.devices)
            few = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
            who = f"{few} share one {'medium' if self.is_medium else 'line'}, which carries"
        if self.is_medium:
            return f"{who} {_mbit(self.down_bytes_per_s)} Mbit/s, down and up together"
        ways = (("down", self.down_bytes_per_s), ("up", self.up_bytes_per_s))
        return f"{who} " + " and ".join(f"{_mbit(rate)} Mbit/s {way}" for way, rate in ways if rate < inf)

    def is_like(self, other: SharedLink) -> bool:
        """Whether it is the same link, with a capacity that differs by too little to matter."""
        rates = zip(self._rates, other._rates, strict=True)
        is_near = all(mine == theirs or abs(mine - theirs) <= _SAME * theirs for mine, theirs in rates)
        return is_near and (self.devices, self.is_medium) == (other.devices, other.is_medium)

    @property
    def _rates(self) -> tuple[float, float]:
        return self.down_bytes_per_s, self.up_bytes_per_s


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.3g}"


def network_of(address: str) -> str:
    """Devices of one network may share a link: one public address, or one private /24; IPv6: one /64."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.version == 4 and not ip.is_private:
        return str(ip)
    return str(ipaddress.ip_network((int(ip), 24 if ip.version == 4 else 64), strict=False))


class Traffic:
    """What devices carried lately, and the links they were found to share."""

    def __init__(self) -> None:
        self.shared: tuple[SharedLink, ...] = ()
        self._windows: deque[Mapping[str, _Rates]] = deque(maxlen=_WINDOWS)
        self._last_s, self._last = -inf, dict[str, Carried]()

    def sampled(self, now_s: float, carried: Mapping[str, Carried]) -> None:
        """Take totals of every connected device at some moment."""
        seconds, last = now_s - self._last_s, self._last
        self._last_s, self._last = now_s, dict(carried)
        if not _LEAST_S <= seconds <= _MOST_S:
            return
        window = {
            name: _Rates(
                (total.down_bytes - last[name].down_bytes) / seconds,
                (total.up_bytes - last[name].up_bytes) / seconds,
                total.down_s - last[name].down_s >= _FULL * seconds,
                total.up_s - last[name].up_s >= _FULL * seconds,
            )
            for name, total in carried.items()
            if name in last and total != last[name]
        }
        if window:
            self._windows.append(window)

    def find(self, networks: Mapping[str, str]) -> bool:
        """Look for shared links among devices, given their networks; return whether something changed.

        A claim stands until traffic exceeds it: a plan that avoids a link gives no evidence of it any more.
        """
        before = self.shared
        kept = [link for known in before if (link := self._reduced(known, networks)) is not None]
        groups: dict[str, list[str]] = {}
        for name, network in networks.items():
            groups.setdefault(network, []).append(name)
        found = [link for group in groups.values() if (link := self._explain(group)) is not None]
        if not found and len(groups) > 1 and (link := self._explain(list(networks))) is not None:
            found = [replace(link, is_servers=True)] if link.devices == frozenset(networks) else [link]
        for link in found:
            same = next((known for known in kept if known.is_like(link)), None)
            kept = [known for known in kept if not known.devices & link.devices] + [same or link]
        self.shared = tuple(kept)
        return self.shared != before

    def _reduced(self, link: SharedLink, networks: Mapping[str, str]) -> SharedLink | None:
        """A known link without the devices that left; None if traffic exceeded it."""
        devices = link.devices & networks.keys()
        if not devices or (len(devices) == 1 < len(link.devices)):
            return None
        if len(self._windows) >= _FEW:
            rates, _ = _arrays(self._windows, sorted(devices))
            sums = rates.sum(axis=1)
            down, up = (sums.sum(axis=1),) * 2 if link.is_medium else (sums[:, 0], sums[:, 1])
            most = float(np.quantile(down, 0.9)), float(np.quantile(up, 0.9))
            if most[0] > _EXCEEDED * link.down_bytes_per_s or most[1] > _EXCEEDED * link.up_bytes_per_s:
                return None
        return link if devices == link.devices else replace(link, devices=devices)

    def _explain(self, names: Sequence[str]) -> SharedLink | None:
        """The link that some of these devices share: all that were busy, or those whose rates vary.

        Those that never were count as sharing it, too, until their own traffic tells.
        """
        rates, is_full = _arrays(self._windows, names)
        if not len(rates):
            return None
        is_busy = is_full.any(axis=(0, 2))
        varies = np.array([_varies(rates[:, i], is_full[:, i]) for i in range(len(names))], dtype=np.bool_)
        for chosen in (is_busy, is_busy & varies):
            if chosen.any():
                members = [names[i] for i in np.flatnonzero(chosen | ~is_busy).tolist()]
                link = _shared(rates[:, chosen], is_full[:, chosen], frozenset(members))
                if link is not None:
                    return link
        return None


class _Rates(NamedTuple):
    down_bytes_per_s: float
    up_bytes_per_s: float
    is_down_full: bool
    is_up_full: bool


_NOTHING = _Rates(0.0, 0.0, False, False)


def _arrays(windows: Sequence[Mapping[str, _Rates]], names: Sequence[str]) -> tuple[Floats, Bools]:
    """[window, device, way]: rates, and whether a direction was full."""
    rows = [[window.get(name, _NOTHING) for name in names] for window in windows]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names), 4)
    return table[:, :, :2], table[:, :, 2:] > 0


def _spread(values: Floats, kinds: Ints) -> float:
    """Mean deviation of values from the median of their kind, relative to it."""
    off = np.zeros(len(values))
    for kind in np.unique(kinds).tolist():
        own = values[kinds == kind]
        middle = float(np.median(own))
        off[kinds == kind] = np.abs(own - middle) / middle if middle > 0 else inf
    return float(off.mean())


def _yielded(own: Floats, others: Floats, link: Ints) -> float:
    """Bytes that a link carried less for every byte that the others carried more: the slope of a line through all."""
    own, others = own.copy(), others.copy()
    for one in np.unique(link).tolist():
        own[link == one] -= own[link == one].mean()
        others[link == one] -= others[link == one].mean()
    varied = float(others @ others)
    return -float(own @ others) / varied if varied > 0 else 0.0


def _varies(rates: Floats, is_full: Bools) -> bool:
    """Whether a device's full directions carried sometimes more, sometimes less."""
    window, way = np.nonzero(is_full)
    return len(window) > 1 and _spread(rates[window, way], way) > _VARIES


def _shared(rates: Floats, is_full: Bools, devices: frozenset[str]) -> SharedLink | None:
    window, device, way = np.nonzero(is_full)
    if len(window) < _FEW:
        return None
    own, link = rates[window, device, way], 2 * device + way
    if _spread(own, link) < _VARIES:
        return None
    same_way, both_ways = rates.sum(axis=1)[window, way], rates.sum(axis=(1, 2))[window]
    in_line, in_medium = _spread(same_way, way), _spread(both_ways, np.zeros_like(way))
    crosses = (both_ways - same_way) > _CROSSING * both_ways
    is_medium = in_medium <= (in_line if crosses.any() else _STEADY)
    total = both_ways if is_medium else same_way
    if min(in_line, in_medium) > _STEADY or _yielded(own, total - own, link) < _YIELDS:
        return None
    if is_medium:
        down = up = float(np.median(both_ways))
    else:
        down, up = (float(np.median(same_way[way == w])) if (way == w).any() else inf for w in (0, 1))
    return SharedLink(devices=devices, down_bytes_per_s=down, up_bytes_per_s=up, is_medium=is_medium, is_servers=False)
