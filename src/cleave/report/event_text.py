"""One line of text per event, for terminals and logs."""

from __future__ import annotations

from cleave import events
from cleave.report.quantities import parameters, plural, seconds, si


def describe(event: events.AnyEvent) -> str | None:
    """Say what happened; None for events that views show in another way or not at all."""
    match event:
        case events.RunStarted():
            return _run_started(event)
        case events.Evaluated():
            return f"step {event.step}: evaluation loss {event.loss:.4f}"
        case events.DeviceJoined():
            down, up = si(event.down_bytes_per_s, "B/s"), si(event.up_bytes_per_s, "B/s")
            speed, memory = si(event.flops_per_s, "FLOP/s"), si(event.memory_bytes, "B")
            return f"{event.device} joined: {speed} ({event.kernel}), {down} down, {up} up, {memory} of memory"
        case events.DeviceLeft():
            lost = f"; reassigning {plural(event.lost_tasks, 'task')}" if event.lost_tasks else ""
            return f"{event.device} left: {event.reason}{lost}"
        case events.DeviceLate():
            if event.is_only:
                return f"{event.device} is late; no other device is connected, so its work waits for it"
            return f"{event.device} is late; other devices take over its work"
        case events.DeviceIdle():
            return f"{event.device} has no work: {event.reason}"
        case events.GrainChosen():
            return f"grain {event.grain}: {event.reason}"
        case events.Audited():
            return None if event.is_right else f"{event.device} failed an audit: its work was wrong"
        case events.RolledBack():
            undone = plural(event.from_step - event.step, "step")
            return (
                f"{undone} undone, back to step {event.step}: {event.device} was found wrong, and they rest on its work"
            )
        case events.ResultRefused():
            return f"{event.device} returned a wrong result, which is recomputed: {event.reason}"
        case events.Recovered():
            blocks = plural(event.blocks, "block")
            return f"other devices finished {blocks} of {event.device} in {seconds(event.seconds)}"
        case events.Paused():
            return event.reason
        case events.Note():
            return event.text
        case events.CheckpointSaved():
            return f"step {event.step}: saved {event.path}"
        case events.Resumed():
            return f"resumed after step {event.step} from {event.path}"
        case events.StepDone() | events.EnergyUsed() | events.RunFinished():
            return None


_WEIGHTS = {
    "fresh": "fresh weights (random, nothing pretrained)",
    "pretrained": "pretrained weights",
    "checkpoint": "weights of the last checkpoint",
}
_TOKENIZERS = {
    "bytes": "a token is one byte of text (this model has no tokenizer)",
    "model": "the model's own tokenizer",
}


def _run_started(event: events.RunStarted) -> str:
    facts = [
        f"{event.model}: {parameters(event.parameters)}",
        _WEIGHTS.get(event.weights, ""),
        _TOKENIZERS.get(event.tokenizer, ""),
        f"{event.tokens_per_step:,} tokens a step",
        f"{event.wire} on the wire",
    ]
    return ", ".join(fact for fact in facts if fact)
