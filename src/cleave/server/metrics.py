"""The state of a fleet in the text format of Prometheus, for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cleave.server.status import DeviceStatus, FleetStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOTALS = {
    "down_bytes": "Bytes sent to devices.",
    "up_bytes": "Bytes received from devices.",
    "products": "Products and resident passes submitted.",
    "waiting_s": "Seconds in which the training loop waited for devices.",
    "checking_s": "Seconds in which the server verified results.",
}
_OF_DEVICES = {
    "tasks": "Tasks done.",
    "done_flops": "Floating-point operations done.",
    "verified_flops": "Floating-point operations of products that were verified on arrival.",
    "wrong": "Results found wrong.",
    "down_bytes": "Bytes sent to this device.",
    "up_bytes": "Bytes received from this device.",
}
_NOW_OF_DEVICES = {
    "flops_per_s": "Measured speed, in floating-point operations per second.",
    "down_bytes_per_s": "Measured downlink.",
    "up_bytes_per_s": "Measured uplink.",
    "latency_s": "Measured latency.",
    "memory_bytes": "Memory offered.",
}


def as_metrics(status: FleetStatus) -> str:
    """Counters and gauges, each with its help text; devices are labels."""
    lines = list[str]()
    lines += _metric("devices", "gauge", "Devices connected.", {"": len(status.devices)})
    for name, text in _TOTALS.items():
        lines += _metric(f"{name}_total", "counter", text, {"": getattr(status, name)})
    if status.steps:
        last = status.steps[-1]
        lines += _metric("step_seconds", "gauge", "Seconds of the last step.", {"": last.seconds})
        lines += _metric("step_predicted_seconds", "gauge", "Seconds predicted for it.", {"": last.predicted_s})
    for name, text in _OF_DEVICES.items():
        lines += _metric(f"device_{name}_total", "counter", text, _by_device(status.devices, name))
    for name, text in _NOW_OF_DEVICES.items():
        lines += _metric(f"device_{name}", "gauge", text, _by_device(status.devices, name))
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterable[str]:
    yield f"# HELP cleave_{name} {text}"
    yield f"# TYPE cleave_{name} {kind}"
    for labels, value in values.items():
        yield f"cleave_{name}{labels} {value!r}"


def _by_device(devices: Iterable[DeviceStatus], name: str) -> dict[str, float]:
    return {f'{{device="{_escaped(one.device)}",trust="{one.trust}"}}': getattr(one, name) for one in devices}


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
