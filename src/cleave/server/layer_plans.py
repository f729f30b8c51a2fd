"""Plans of single linear layers' products: searched for once, judged by new rates at every step, replaced now and then.

A search takes a second for a fleet of dozens, longer than many a step. So a plan whose devices are all connected
stays in use while the planning process searches for another: when it became slower, every few steps, and when devices
came or went. A step waits only if there is no such plan, or if the fleet is planned in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Linear
from cleave.core.plan.choose import LayerChoice, Local, Setting, choose_layer, choose_layer_again
from cleave.server.plan_process import PlanProcess

SEARCHED_EVERY = 8
"""Steps after which changed rates of the same devices lead to a new search: it costs as much CPU as a small step."""
SLOWER = 1.1
"""Factor by which a plan or an arrangement may become slower before another one is searched for at once."""
_MOST_LAYERS = 1024
"""Choices that are kept, one per layer shape and number of tokens."""

Snapshot = tuple[int, Profiles | None]
"""A number that grows with every change of the fleet, and the fleet's devices."""
_Layer = tuple[Linear, Local]


@dataclass(frozen=True, slots=True)
class _Chosen:
    choice: LayerChoice
    number: int
    """Number of the snapshot by which it was judged."""
    names: tuple[str, ...]
    """Devices among which the plan was searched for."""
    searched_step: int
    searched_s: float
    """Time of the plan then."""


class LayerPlans:
    """Call `choose` from any thread."""

    def __init__(self, process: PlanProcess, *, is_planned_here: Callable[[Profiles | None], bool]) -> None:
        """`is_planned_here` says whether a fleet is planned in this process."""
        self._process, self._is_planned_here = process, is_planned_here
        self._lock = threading.RLock()
        self._chosen: dict[_Layer, _Chosen] = {}
        self._searching: set[_Layer] = set()
        """Layers for which another plan is being searched for."""
        self._executor = ThreadPoolExecutor(1, "cleave-search")

    def choose(self, linear: Linear, local: Local, fleet: Snapshot, setting: Setting, step: int) -> LayerChoice:
        """Choose where a linear layer's products are computed, and by which devices."""
        number, profiles = fleet
        with self._lock:
            known = self._chosen.get((linear, local))
            if known is not None and known.number == number:
                return known.choice
            if known is not None and profiles is not None:
                standing = self._judged(linear, local, known, number, profiles, setting, step)
                if standing is not None:
                    self._chosen[linear, local] = standing
                    return standing.choice
            if profiles is None or self._is_planned_here(profiles):
                choice = choose_layer(linear, profiles, setting, local)
            else:
                choice = self._process.call(choose_layer, linear, profiles, setting, local)
            self._keep(linear, local, fleet, step, choice)
            return choice

    def settle(self) -> None:
        """Wait until nothing is searched for."""
        self._executor.submit(int).result()  # behind everything else

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _judged(
        self,
        linear: Linear,
        local: Local,
        known: _Chosen,
        number: int,
        profiles: Profiles,
        setting: Setting,
        step: int,
    ) -> _Chosen | None:
        """Return a known choice with its time by new rates; None if another must be waited for."""
        plan = known.choice.plan
        choice = None if plan is None else choose_layer_again(linear, profiles, setting, local, plan)
        if choice is None or choice.plan is None:
            return None
        is_due = step - known.searched_step >= SEARCHED_EVERY or known.names != profiles.names
        if is_due or choice.plan.total_s > known.searched_s * SLOWER:
            if self._is_planned_here(profiles):
                return None
            self._search(linear, local, (number, profiles), setting, step)
        return replace(known, choice=choice, number=number)

    def _search(self, linear: Linear, local: Local, fleet: Snapshot, setting: Setting, step: int) -> None:
        """Search for another plan while the one there is serves."""
        if (linear, local) in self._searching:
            return
        self._searching.add((linear, local))

        def search() -> None:
            choice = self._process.ask(choose_layer, linear, fleet[1], setting, local)
            with self._lock:
                self._searching.discard((linear, local))
                if choice is not None:
                    self._keep(linear, local, fleet, step, choice)

        self._executor.submit(search)

    def _keep(self, linear: Linear, local: Local, fleet: Snapshot, step: int, choice: LayerChoice) -> None:
        if len(self._chosen) >= _MOST_LAYERS:
            self._chosen.clear()
        number, profiles = fleet
        names = () if profiles is None else profiles.names
        seconds = 0.0 if choice.plan is None else choice.plan.total_s
        self._chosen[linear, local] = _Chosen(choice, number, names, step, seconds)
