"""`cleave plan --model` as text: the plane of tokens x parameters, and the step time against every alternative."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.text import Text

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import step_flops
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.plane import tiles, worth_of_one_more
from cleave.core.plan.step import StepChoice, StepPlan
from cleave.report.plain import plain_console
from cleave.report.plan_words import CloudGpu, devices_text, limit_text, print_gpu, server_text, table
from cleave.report.quantities import parameters, seconds, si

_WIDTH, _HEIGHT = 96, 16
_COLOURS = ("blue", "yellow", "green", "magenta", "red", "cyan")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def show_choice(choice: StepChoice, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    console = plain_console()
    shape = choice.shape
    lora = f" with LoRA of rank {shape.adapter_rank}" if shape.adapter_rank else ""
    facts = (
        f"{lora} ({parameters(shape.params)}), {choice.tokens:,} tokens a step in sequences of {choice.sequence:,}, "
        f"wire {choice.wire}, {devices_text(len(profiles))}, {server_text(server)}"
    )
    console.print(Text.assemble((shape.name, "bold"), facts))
    if isinstance(choice.plan, ModelPlan):
        _show_plane(console, choice.plan, profiles)
    ratio = f"{choice.step_s / choice.bound_s:.3f} times the lower bound"
    outcome = f", grain {choice.grain}: {choice.arrangement}; {ratio}"
    console.print(Text.assemble((f"step {seconds(choice.step_s)}", "bold"), outcome))
    if isinstance(choice.plan, ModelPlan):
        _show_columns(console, choice.plan, profiles)
    _show_rivals(console, choice)
    if isinstance(choice.plan, StepPlan):  # reported by plan_text
        return
    print_gpu(
        console, step_flops(shape, choice.tokens, choice.sequence), choice.step_s, gpu, None if lora else shape.params
    )


def _show_plane(console: Console, plan: ModelPlan, profiles: Profiles) -> None:
    """Print the plane, tokens down, parameters across: a letter per device class, alternating in case."""
    units = tiles(plan)
    params = sum(sublayer.params for sublayer in sublayers_of(plan.shape))
    width = min(_WIDTH, max(console.width - 2, 20))
    sides = np.array([unit.params for unit in units]) * (width / params)
    heights = np.array([unit.tokens for unit in units]) * (_HEIGHT / plan.tokens)
    letters, classes = _letters(profiles), dict(zip(profiles.names, profiles.device_class, strict=True))
    in_column: Counter[tuple[int, int]] = Counter()
    turns = np.zeros(len(units), dtype=np.int64)
    for number, unit in enumerate(units):
        column = unit.stage, unit.part
        turns[number] = in_column[column] + len(in_column)
        in_column[column] += 1
    for row in range(_HEIGHT):
        line = Text()
        across = (heights[:, 0] <= row + 0.5) & (heights[:, 1] > row + 0.5)
        for place in range(width):
            hits = np.flatnonzero(across & (sides[:, 0] <= place + 0.5) & (sides[:, 1] > place + 0.5))
            if len(hits) == 0:
                line.append(" ")
                continue
            letter, colour = letters[classes[units[hits[0]].device]]
            line.append(letter.upper() if turns[hits[0]] % 2 else letter, style=colour)
        console.print(line, soft_wrap=True)
    legend = Text(", ").join(
        Text.assemble((letter, colour), f" {kind or 'device'}") for kind, (letter, colour) in letters.items()
    )
    console.print(Text("tokens down, parameters across, each patch of equal letters is a device: ") + legend)


def _letters(profiles: Profiles) -> dict[str, tuple[str, str]]:
    """A letter and a color per class: its first letter that is still free."""
    found: dict[str, tuple[str, str]] = {}
    for kind in dict.fromkeys(profiles.device_class):
        taken = {letter for letter, _ in found.values()}
        usable = [letter for letter in (kind.lower() or "d") + _LETTERS if letter.isalpha() and letter not in taken]
        found[kind] = usable[0] if usable else "x", _COLOURS[len(found) % len(_COLOURS)]
    return found


def _show_columns(console: Console, plan: ModelPlan, profiles: Profiles) -> None:
    columns = sum(len(stage.columns) for stage in plan.stages)
    chunks = "/".join(str(chunk) for chunk in dict.fromkeys(plan.chunks))
    used = len(profiles) - len(plan.left_out)
    console.print(
        f"{_counted(len(plan.stages), 'stage')}, {_counted(columns, 'column')} on {devices_text(used)}, "
        f"chunks of {chunks} tokens"
        + (f", {len(plan.rounds)} rounds, as memory cannot hold the model at once" if len(plan.rounds) > 1 else "")
    )
    console.print(
        f"activations {seconds(plan.activation_s)}, synchronization {seconds(plan.synchronisation_s)}, fill "
        f"{seconds(plan.fill_s)}; limited by {limit_text(plan.limit)}; through the server: down "
        f"{si(plan.down_bytes, 'B')}, up {si(plan.up_bytes, 'B')}"
    )
    if plan.lease_states is not None:
        _show_leases(console, plan)
    if plan.left_out:
        reasons = Counter(plan.left_out.values())
        told = "; ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common())
        console.print(f"left out: {len(plan.left_out):,} of {devices_text(len(profiles))}: {told}")
    else:
        console.print("every device takes part")
    worth = "; ".join(f"{kind} {seconds(saved)}" for kind, saved in worth_of_one_more(plan, profiles).items())
    console.print(f"adding one device would save about: {worth}")


def _show_leases(console: Console, plan: ModelPlan) -> None:
    """Say which columns are leased, how often snapshots are taken, and what the server logs in between."""
    leased = [column for column in plan.columns if column.is_leased]
    if not leased:
        console.print("no column is leased: all are synchronized in every step")
        return
    for column in plan.columns:
        holders = ", ".join(holding.device for holding in column.holdings)
        how = f"leased, a snapshot every {column.snapshot_every} steps" if column.is_leased else "synchronized"
        cut = f", slice {column.shard.index + 1} of {column.shard.of}" if column.shard.of > 1 else ""
        console.print(f"  sublayers {column.shard.first + 1} to {column.shard.stop}{cut} on {holders}: {how}")
    console.print(
        f"{len(leased)} of {_counted(len(plan.columns), 'column')} leased: devices keep weights and optimizer state; "
        f"the server logs up to {si(plan.log_bytes, 'B')} between snapshots"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _show_rivals(console: Console, choice: StepChoice) -> None:
    rows = table("arrangement", "step", "x")
    rows.add_column("how", overflow="fold")
    for way in choice.rivals:
        rows.add_row(
            Text(way.name, style="bold" if way.name == choice.arrangement else ""),
            seconds(way.step_s) if way.fits else "-",
            f"{way.step_s / choice.step_s:.2f}" if way.fits else "-",
            way.arrangement,
        )
    console.print(rows)
    _show_faster(console, choice)


def _show_faster(console: Console, choice: StepChoice) -> None:
    """Say plainly where a rival wins, by how much and why."""
    if not choice.faster:
        console.print("no rival is faster")
        return
    for rival in choice.faster:
        console.print(
            Text.assemble(
                (f"{rival.name} is {choice.step_s / rival.step_s:.2f} times as fast", "bold"), f": {rival.spares}"
            )
        )
    console.print("cleave train does not run rivals; the plan above is the fastest that it can run")
