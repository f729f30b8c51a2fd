"""What administrators may do to a run from its dashboard: orders about a device or a token."""

from __future__ import annotations

from typing import Literal

import msgspec

from cleave.errors import InputError
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    do: Literal["pause", "resume", "drain", "ban", "revoke"]
    to: str
    """A device's name; to revoke: the id of a token."""


def obey(body: bytes, cluster: Cluster, keys: Keys) -> None:
    """Carry out an order. Raises InputError if it is not an order, or cannot be carried out."""
    try:
        order = msgspec.json.decode(body, type=Order)
    except msgspec.DecodeError as fault:
        raise InputError(f'expected an order such as {{"do": "pause", "to": "DEVICE"}}, but {fault}') from None
    match order.do:
        case "pause":
            cluster.pause(order.to)
        case "resume":
            cluster.resume(order.to)
        case "drain":
            cluster.drain(order.to)
        case "ban":
            cluster.ban(order.to)
        case "revoke":
            keys.revoke(order.to)
