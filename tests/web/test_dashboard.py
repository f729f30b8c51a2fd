"""The dashboard: live and finished runs in one view, for administrators only, without errors and without lag."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
import torch
from tests.support.models import make, tokens
from tests.web.accessibility import complaints
from tests.web.conftest import by_keyboard

from cleave import Fleet, distribute, events
from cleave.events import EventLog
from cleave.report.viewing import viewer
from cleave.run_files import EVENTS
from cleave.server.admission.tokens import FILE, Keys

if TYPE_CHECKING:
    from playwright.sync_api import Page

DEVICES, STEPS = 1000, 9000


def joined(number: int) -> events.DeviceJoined:
    return joined_as(f"device-{number}", number)


def joined_as(name: str, number: int = 0) -> events.DeviceJoined:
    return events.DeviceJoined(
        device=name,
        flops_per_s=1e9 * (1 + number % 7),
        down_bytes_per_s=1e7,
        up_bytes_per_s=2e6,
        latency_s=0.02,
        memory_bytes=1e9,
        kernel="numpy",
    )


def step(number: int) -> events.StepDone:
    return events.StepDone(
        step=number,
        loss=3.0 / number,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=2048,
        seconds=1.5,
        predicted_s=1.4,
        waiting_s=1.0,
        devices=DEVICES,
        down_bytes=10_000_000,
        up_bytes=5_000_000,
    )


STARTED = events.RunStarted(
    model="demo", parameters=1, steps=STEPS, first_step=1, tokens_per_step=2048, wire="bf16", seed=1
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """10,000 events of a run with 1,000 devices."""
    path = tmp_path / EVENTS
    write = EventLog(path, lambda: 1.7e9)
    write(STARTED)
    for number in range(DEVICES):
        write(joined(number))
    for number in range(1, STEPS):
        write(step(number))
    write(events.RunFinished(step=STEPS - 1, loss=0.1, reason="done"))
    write.close()
    return path


@pytest.fixture
def finished(log: Path) -> Iterator[str]:
    server = viewer(log)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def show(page: Page, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(address)
    page.wait_for_selector("#state:text-is('Finished')")
    page.wait_for_selector(f"#figures:has-text('{STEPS - 1} of {STEPS}')")


@pytest.mark.parametrize("width", [390, 1200])
def test_a_finished_run_of_a_large_fleet_is_shown(finished: str, page: Page, width: int) -> None:
    show(page, finished, width)
    assert page.locator("#fleet tr").count() > 100
    assert page.locator("#loss polyline").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_dashboard_is_accessible(finished: str, page: Page, scheme: Literal["light", "dark"], width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    show(page, finished, width)
    assert complaints(page) == []


def test_a_large_run_takes_few_elements(finished: str, page: Page) -> None:
    """So that drawing does not grow with the run: 10,000 events and 1,000 devices."""
    page.goto(finished)
    page.wait_for_selector("#state:text-is('Finished')")
    page.wait_for_selector("#loss polyline")
    assert page.evaluate("document.querySelectorAll('*').length") < 6000
    points = page.evaluate("document.querySelector('#loss polyline').getAttribute('points').split(' ').length")
    assert points < 700


def test_a_live_run_is_followed_by_administrators_only(page: Page, tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    _, admin = person.add("admin")
    keys = Keys(path=tmp_path / FILE)
    write = EventLog(tmp_path / EVENTS, lambda: 1.7e9)
    write(STARTED)
    with Fleet("127.0.0.1:0", token="", keys=keys, directory=tmp_path) as fleet:
        address = fleet.url.replace("ws://", "http://", 1)
        page.goto(f"{address}/#{admin}.{'a' * 22}")  # as in a join command, with the certificate's fingerprint
        page.wait_for_selector("#state:text-is('Live')")
        write(step(1))
        page.wait_for_selector(f"#figures:has-text('1 of {STEPS}')")
        write(step(2))
        page.wait_for_selector(f"#figures:has-text('2 of {STEPS}')")
        page.goto("about:blank")
    write.close()


@pytest.mark.parametrize("grain", ["gemm", "resident"])
def test_the_latest_step_and_its_plan_are_drawn(grain: Literal["gemm", "resident"], page: Page, tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    with Fleet("127.0.0.1:0", directory=tmp_path, offload="always") as fleet:
        fleet.start_devices(2)
        fleet.wait(2)
        model = distribute(make("llama"), fleet, grain=grain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            batch = tokens(number, 8, 64)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
        page.goto(fleet.url.replace("ws://", "http://", 1))
        page.wait_for_selector("#timeline rect title", state="attached")
        assert "computed" in str(page.get_attribute("#timeline svg", "aria-label"))
        assert page.locator("#timeline rect").count() > 3
        page.wait_for_selector("#plan rect")
        assert page.is_hidden("#orders"), "nobody showed a token"
        assert by_keyboard(page) == ["scroll", "events"], "what scrolls must do so by keyboard, too"
        page.goto("about:blank")


def test_an_administrator_pauses_and_resumes_a_device(page: Page, tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    _, admin = person.add("admin")
    (tmp_path / EVENTS).touch()
    with Fleet("127.0.0.1:0", keys=Keys(path=tmp_path / FILE), directory=tmp_path) as fleet:
        fleet.start_devices(1)
        fleet.wait(1)
        page.goto(f"{fleet.url.replace('ws://', 'http://', 1)}/#{admin}")
        page.wait_for_selector("[data-order=pause]:enabled")
        orders = ["pause", "drain", "ban"]
        assert by_keyboard(page) == ["scroll", "order-device", *orders, "events"], "whatever can be used"
        page.focus("[data-order=pause]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#order-device option:has-text('(paused)')", state="attached")
        assert not fleet.devices
        page.click("[data-order=resume]:enabled")
        page.wait_for_selector("#order-device option:not(:has-text('(paused)'))", state="attached")
        page.wait_for_selector("#fleet th[scope=row]")
        page.goto("about:blank")


def test_a_name_is_text_whatever_it_contains(page: Page, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    (tmp_path / EVENTS).write_bytes(
        b"".join(msgspec.json.encode(each) + b"\n" for each in (events.Note(text=name), joined_as(name)))
    )
    server = viewer(tmp_path / EVENTS)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    page.wait_for_selector(f"#fleet:has-text('{name}')")
    page.wait_for_selector(f"#events:has-text('{name} joined')")
    assert page.locator("img").count() == 0
    server.shutdown()
    server.server_close()


def test_without_a_token_the_dashboard_asks_for_one(browser: object, tmp_path: Path) -> None:
    from playwright.sync_api import Browser

    assert isinstance(browser, Browser)
    person = Keys(path=tmp_path / FILE)
    _, admin = person.add("admin")
    (tmp_path / EVENTS).write_text(json.dumps({"event": "note", "time_s": 0, "text": "hello"}) + "\n")
    with Fleet("127.0.0.1:0", token="", keys=Keys(path=tmp_path / FILE), directory=tmp_path) as fleet:
        page = browser.new_page()  # the console of this one reports the refusal, as it should
        page.goto(fleet.url.replace("ws://", "http://", 1))
        page.wait_for_selector("#ask:visible")
        assert page.locator("#events li").count() == 0
        page.fill("#token", admin)
        page.click("#ask button")
        page.wait_for_selector("#events:has-text('hello')")
        page.close()
