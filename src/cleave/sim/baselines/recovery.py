"""What the departure of a device costs, one function per manner of recovery: mean seconds added to its batch.

A departure comes at any moment of a batch, so half a batch is under way on average, and it may be any of the devices.
Constants and their sources are in `facts/rivals.csv`. What had to be assumed favors the rivals: a checkpoint after
every batch that takes no time to save, a spare device at hand, no second departure during recovery, and 12 bytes a
trained parameter to move (fp32 master copy and two moments; the 16-bit weights follow from the copy), as late as that
device's link allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Bools, Floats, Profiles
from cleave.core.plan.gemm.product import SERVER, GemmPlan
from cleave.core.plan.gemm.repair import repair
from cleave.core.plan.rivals.case import WEIGHT_BYTES, Case
from cleave.core.plan.rivals.stages import Placement
from cleave.errors import InfeasibleError
from cleave.sim.baselines.work import fact, link_bytes_per_s

_MOVED_BYTES = 12
_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """A departure, as those see it who have to make up for it."""

    batch_s: float
    fill_s: float = 0.0
    """A micro-batch through all stages and back: what it takes to fill the pipelines again."""
    moved_bytes: Floats
    """What a successor of each device must be sent."""
    link_bytes_per_s: float
    """Rate at which it is sent."""
    server: Server

    @property
    def lost_s(self) -> float:
        """Work since the last checkpoint, which was made between batches."""
        return self.batch_s / 2

    @property
    def moving_s(self) -> float:
        return float(self.moved_bytes.mean()) / self.link_bytes_per_s


def moved_bytes(params: Floats, trained: Floats) -> Floats:
    """What a successor needs of so many parameters; frozen ones travel as weights."""
    return WEIGHT_BYTES * (params - trained) + _MOVED_BYTES * trained


def loss_of(case: Case, placed: Placement, batch_s: float, fill_s: float) -> Loss:
    """The departure of a device from pipelines of stages."""
    ends = ((placed.has_table, case.table), (placed.has_head, case.head))
    params = placed.layers * case.layer.params + sum(has * part.params for has, part in ends)
    trained = placed.layers * case.layer.trained + sum(has * part.trained for has, part in ends)
    return Loss(
        batch_s=batch_s,
        fill_s=fill_s,
        moved_bytes=moved_bytes(params, trained),
        link_bytes_per_s=link_bytes_per_s(case.profiles, placed.devices),
        server=case.server,
    )


def checkpoint_restart(loss: Loss) -> float:
    """All stop, a spare loads the lost stage from the last checkpoint, and all begin the batch again.

    Source: torch elastic's manner; a rendezvous of all nodes takes what Bamboo's simulator says.
    """
    return fact("bamboo_rendezvous_s") + loss.lost_s + loss.moving_s + loss.fill_s


def varuna(loss: Loss) -> float:
    """Varuna (arXiv:2111.04007): wait for the silent worker, morph to another number of stages, load, begin again.

    Stages change for everybody, so all load at once: over their own links, and all together from the server's.
    """
    all_s = float(loss.moved_bytes.sum()) / loss.server.down_bytes_per_s
    loading_s = max(float(loss.moved_bytes.max()) / loss.link_bytes_per_s, all_s)
    return fact("varuna_wait_s") + loss.lost_s + loading_s + loss.fill_s


def bamboo(loss: Loss) -> float:
    """Bamboo (arXiv:2204.12013): the predecessor, which holds the stage as well, does both: steps take 1.5 times.

    Nothing is lost, but every device must hold its successor's stage too: whoever asks checks that memory allows it.
    """
    return fact("bamboo_takeover_s") + (fact("bamboo_slowdown") - 1) * loss.lost_s


def oobleck(loss: Loss) -> float:
    """Oobleck (arXiv:2309.08125): another pipeline template; missing layers are copied from a replica, no checkpoint.

    The batch begins again. Takes two pipelines at least: whoever asks checks that.
    """
    return loss.lost_s + loss.moving_s + loss.fill_s


def swarm(loss: Loss, shares: Floats) -> float:
    """SWARM (arXiv:2301.11913): peers of the same stage take over the micro-batches of the lost one.

    `shares` is the part of its stage's work that each device does, w. The rest of the batch goes through 1 - w of the
    stage, and what the lost peer had accumulated is done again: together batch x w / (1 - w). A stage without peers
    waits for the next rebalancing, half an interval on average, and for its state, and does half a batch again.
    """
    alone = shares > 1 - 1e-9
    mates_s = loss.batch_s * shares / np.where(alone, 1.0, 1 - shares)
    waiting_s = fact("swarm_rebalance_s") / 2 + loss.lost_s + loss.moved_bytes / loss.link_bytes_per_s
    return float(np.where(alone, waiting_s, np.minimum(mates_s, waiting_s)).mean())


def averaging(loss: Loss, shares: Floats, reduction_s: float) -> float:
    """hivemind: the others go on with their samples, and those of the lost peer are done again.

    As with SWARM's peers: batch x w / (1 - w). Lost while averaging, a peer makes the others wait for a timeout. The
    last peer takes everything with it.
    """
    alone = shares > 1 - 1e-9
    redone_s = np.where(alone, loss.lost_s, (loss.batch_s - reduction_s) * shares / np.where(alone, 1.0, 1 - shares))
    return float(redone_s.mean()) + fact("hivemind_averaging_timeout_s") * reduction_s / loss.batch_s


def asteroid(loss: Loss, has_mates: Bools) -> float:
    """Asteroid (arXiv:2408.08015): pipeline replay; neighbors hold a copy of each stage, layers migrate between them.

    The batch is replayed. A device with mates in its group has its part of micro-batches taken over without moving
    weights; a stage without mates moves over one link. Heartbeats are taken to notice at once.
    """
    moving_s = np.where(has_mates, 0.0, loss.moved_bytes / loss.link_bytes_per_s)
    return loss.lost_s + float(moving_s.mean()) + loss.fill_s


def cleave(plan: GemmPlan, profiles: Profiles) -> float | None:
    """Cleave, gemm by gemm: the lost block is cut anew over its column mates or other devices, and nothing else.

    The mean over a few of the plan's devices; None if nobody is left to take a block.
    """
    numbers: list[int] = np.unique(plan.tiling.device).tolist()
    names = [plan.names[number] for number in numbers if plan.names[number] != SERVER]
    lost = names[:: max(len(names) // _TRIED, 1)][:_TRIED]
    try:
        return float(np.mean([repair(plan, profiles, [name]).recovery_s for name in lost]))
    except InfeasibleError:
        return None
