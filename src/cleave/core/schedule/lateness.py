"""How long a device may take: the one place that says what a device which stops working can cost.

A task that should take x seconds, and should be done at some time (`due`), passes three limits if its result does not
come. *Late*: the device gets no new work, and others compute its products too. *Stalled*, for a task of a pass, which
only its device can do: the device is moved out of the pass, and others recompute what it had. *Overdue*: the device is
disconnected. Only two things move the last two limits, and neither by more than `MOST_TIMES`: parts of the result that
were requested and accepted, in proportion to their share of it; and bytes that move, as on a slow link. So a run
waits for one device at most `lost_s(x)` at a time, whatever the device sends instead of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_TIMES = 3.0
"""How many times its slack a device may take while it makes progress."""
MOVED_S = 5.0
"""Time for which bytes that moved count as progress; they are counted every two seconds."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Time that a task may take after it should be done: seconds, plus a multiple of its predicted duration."""

    base_s: float
    times: float

    def seconds(self, expected_s: float) -> float:
        return self.base_s + self.times * expected_s

    def limit(self, due: float, expected_s: float, *, returned: float, moved_at: float) -> float:
        """When the slack is used up, given the share of the result that was `returned`."""
        slack_s = self.seconds(expected_s)
        steady = due + slack_s * (1 + (MOST_TIMES - 1) * returned)
        return max(steady, min(moved_at + MOVED_S, due + MOST_TIMES * slack_s))


LATE_S = 0.5
LATE = Slack(LATE_S, 3.0)
STALLED = Slack(2.0, 6.0)
OVERDUE = Slack(10.0, 10.0)


def lost_s(expected_s: float, *, moves_bytes: bool = False, slack: Slack = STALLED) -> float:
    """Longest time a run waits for a stalled device, from the start of its task: a seconds + b times the prediction.

    With `slack=OVERDUE`: where no other device could take its place, until it is disconnected.
    """
    return expected_s + (MOST_TIMES if moves_bytes else 1.0) * slack.seconds(expected_s)


class Elapsed(NamedTuple):
    """Observed durations of a task whose result just arrived."""

    longest_s: float
    """Since the oldest unfinished task of its device started: no reported duration can be longer."""
    late_s: float
    """If the task is late: since it started, or since the device's last result if that was after. 0 otherwise."""
