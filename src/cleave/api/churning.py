"""Parse `--churn`: when devices come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cleave.disk import read_whole
from cleave.errors import InputError
from cleave.facts import table
from cleave.sim.availability import fit
from cleave.sim.churn import AWAY_S, Stay, constant, daily, of_each, traced

DAY_S = 86_400.0
_FITTED = "fta:"
_MOST_BYTES = 1 << 26


def churn_of(
    kind: str, names: Sequence[str], *, seed: int, away_s: float = AWAY_S, day_s: float = DAY_S
) -> Callable[[], Mapping[str, Iterable[Stay]]]:
    """Return a function that draws every device's stays, the same ones at every call.

    `kind` is a number of departures per device and hour, `daily`, `fta:` with the name of a trace in the Failure Trace
    Archive (`fta:microsoft99`, `fta:skype06:gamma`), or the path of a trace.
    """
    if kind == "daily":
        return lambda: of_each(names, seed, lambda rng: daily(rng, day_s))
    if kind.startswith(_FITTED):
        fitted = fit(table("availability_distributions"), kind.removeprefix(_FITTED))
        return lambda: of_each(names, seed, fitted.lives)
    with suppress(ValueError):
        rate = float(kind)
        if not 0 <= rate < 1e9:
            raise InputError(f"expected --churn to be a number of departures per hour of at least 0, got {kind}")
        return lambda: of_each(names, seed, lambda rng: constant(rng, rate, away_s))
    try:
        stays = traced(read_whole(Path(kind), _MOST_BYTES).decode("utf-8"), kind, names)
    except (OSError, UnicodeDecodeError) as fault:
        why = (fault.strerror if isinstance(fault, OSError) else None) or "it is not text"
        raise InputError(
            f"expected --churn to be a rate, daily, fta:TRACE or the path of a trace, but {kind} cannot be read: {why}"
        ) from None
    return lambda: stays
