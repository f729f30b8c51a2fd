"""The page that lends a browser: it trains like any device, and keeps to its owner's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from tests.support.models import make, tokens
from tests.web.accessibility import complaints
from tests.web.conftest import ELSEWHERE, GUARD_MS, by_keyboard
from torch import nn

from cleave import Fleet, distribute, events
from cleave.transport.shaped import Link

if TYPE_CHECKING:
    from playwright.sync_api import Page

STEPS = 5
TOKEN = "secret"
CLOSE = 1e-4
SLOW = Link(down_bytes_per_s=3e6, up_bytes_per_s=3e6)
"""So slow that several devices are faster than one, however fast this machine is."""
BATTERY = """
    const battery = new EventTarget();
    battery.charging = true;
    navigator.getBattery = async () => battery;
    globalThis.unplug = (is) => { battery.charging = !is; battery.dispatchEvent(new Event("chargingchange")); };
"""
VISIBILITY = """
    let seen = "visible";
    Object.defineProperty(document, "visibilityState", { get: () => seen });
    globalThis.hide = (is) => {
        seen = is ? "hidden" : "visible";
        document.dispatchEvent(new Event("visibilitychange"));
    };
"""
WAKE_LOCK = """
    globalThis.locks = [];
    const request = async () => {
        const lock = { released: false, release: async () => { lock.released = true; } };
        const look = () => { lock.released ||= document.visibilityState === "hidden"; };
        document.addEventListener("visibilitychange", look);
        globalThis.locks.push(lock);
        return lock;
    };
    Object.defineProperty(navigator, "wakeLock", { value: { request } });
"""


def losses(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=3e-3), list[float]()
    for step in range(STEPS):
        batch = tokens(step % 2, 8, 64)
        loss = model(input_ids=batch, labels=batch).loss
        after(step)  # forward is done, backward is not
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(make("llama"))


@pytest.fixture
def told() -> SimpleQueue[events.AnyEvent]:
    """What happens to the fleet."""
    return SimpleQueue()


@pytest.fixture
def fleet(told: SimpleQueue[events.AnyEvent]) -> Iterator[Fleet]:
    with Fleet.serve("127.0.0.1:0", token=TOKEN, wire="fp32", offload="always", listener=told.put) as served:
        yield served


@pytest.fixture
def slow() -> Iterator[Fleet]:
    with Fleet("127.0.0.1:0", token=TOKEN, wire="fp32", offload="always", links=SLOW) as served:
        yield served


def address_of(fleet: Fleet, query: str = "") -> str:
    return f"{fleet.url.split('#')[0]}/join{query}#{TOKEN}".replace("ws", "http", 1)


def lend(page: Page, fleet: Fleet, query: str = "") -> None:
    """Open the page and press its button."""
    page.goto(address_of(fleet, query))
    page.click("#button:enabled")
    page.wait_for_selector("#state[data-state=joined]")


def joined(told: SimpleQueue[events.AnyEvent]) -> events.DeviceJoined:
    while not isinstance(event := told.get(timeout=GUARD_MS / 1000), events.DeviceJoined):
        pass
    return event


def left(told: SimpleQueue[events.AnyEvent]) -> events.DeviceLeft:
    while not isinstance(event := told.get(timeout=GUARD_MS / 1000), events.DeviceLeft):
        pass
    return event


def tasks_of_browsers(fleet: Fleet) -> int:
    return sum(device.tasks for device in fleet.devices if device.kernel.startswith("w"))


def close_to(ours: list[float], plain: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < CLOSE


@pytest.mark.parametrize("grain", ["gemm", "resident"])
def test_a_browser_trains_beside_native_devices_with_the_losses_of_plain_torch(
    grain: Literal["gemm", "resident"], page: Page, slow: Fleet, plain: list[float]
) -> None:
    slow.start_devices(2)
    lend(page, slow)
    slow.wait(3)
    ours = losses(distribute(make("llama"), slow, grain=grain))
    assert plain[-1] < plain[0], "the model must really learn"
    assert close_to(ours, plain)
    assert len(slow.devices) == 3
    assert all(device.tasks and not device.wrong for device in slow.devices), "each must have computed something"


@pytest.mark.parametrize("grain", ["gemm", "resident"])
def test_a_browser_alone_does_every_task(
    grain: Literal["gemm", "resident"], page: Page, fleet: Fleet, plain: list[float]
) -> None:
    lend(page, fleet)
    assert close_to(losses(distribute(make("llama"), fleet, grain=grain)), plain)
    assert tasks_of_browsers(fleet) > 0
    page.wait_for_selector("#tasks:not(:text-is('0'))")
    page.wait_for_selector("#accepted:not(:text-is('0 GFLOP'))")
    if grain == "gemm":
        page.wait_for_selector("#verified:not(:text-is('0 GFLOP'))")


@pytest.mark.parametrize(
    ("grain", "how"),
    [("gemm", "close"), ("resident", "close"), ("resident", "hide(true)"), ("resident", "unplug(true)")],
)
def test_a_device_that_leaves_in_mid_step_loses_nothing(
    grain: Literal["gemm", "resident"], how: str, page: Page, slow: Fleet, plain: list[float]
) -> None:
    slow.start_devices(1)
    slow.wait(1)
    page.add_init_script(BATTERY + VISIBILITY)
    lend(page, slow)
    slow.wait(2)

    def leave(step: int) -> None:
        if step == 1:
            assert tasks_of_browsers(slow) > 0
            if how == "close":
                page.close()
            else:
                page.evaluate(how)

    assert close_to(losses(distribute(make("llama"), slow, grain=grain), leave), plain)
    assert len(slow.devices) == 1


@pytest.mark.parametrize(
    ("event", "back", "words"),
    [("unplug(true)", "unplug(false)", "battery"), ("hide(true)", "hide(false)", "hidden")],
)
def test_a_device_leaves_and_returns_as_its_owner_wants(
    event: str, back: str, words: str, page: Page, fleet: Fleet, told: SimpleQueue[events.AnyEvent]
) -> None:
    page.add_init_script(BATTERY + VISIBILITY)
    lend(page, fleet)
    page.evaluate(event)
    page.wait_for_selector("#state:text-is('Paused')")
    assert words in page.inner_text("#reason")
    assert words in left(told).reason
    assert not fleet.devices
    page.evaluate(back)
    page.wait_for_selector("#state[data-state=joined]")


def test_a_device_that_runs_on_its_battery_cannot_be_lent(page: Page, fleet: Fleet) -> None:
    page.add_init_script(BATTERY)
    page.goto(address_of(fleet))
    page.wait_for_selector("#button:enabled")
    page.evaluate("unplug(true)")
    page.wait_for_selector("#button:disabled")
    page.uncheck("#only-charging")
    page.click("#button:enabled")
    page.wait_for_selector("#state[data-state=joined]")


def test_the_screen_stays_on_again_after_the_page_was_hidden(page: Page, fleet: Fleet) -> None:
    page.add_init_script(VISIBILITY + WAKE_LOCK)
    lend(page, fleet)
    page.check("#in-background")
    page.wait_for_function("locks.length === 1")
    page.evaluate("hide(true)")
    assert page.evaluate("locks[0].released")
    page.evaluate("hide(false)")
    page.wait_for_function("locks.length === 2 && !locks[1].released")
    page.click("#button")
    page.wait_for_function("locks[1].released")


def test_a_tab_that_is_hidden_for_a_moment_returns(page: Page, fleet: Fleet) -> None:
    page.add_init_script(VISIBILITY)
    lend(page, fleet)
    page.evaluate("hide(true); hide(false)")  # what the former worker says last comes when there is another one
    page.wait_for_selector("#state[data-state=joined]")
    assert page.inner_text("#button") == "Stop"


def test_without_a_battery_the_owner_is_asked(page: Page, fleet: Fleet) -> None:
    page.add_init_script("delete Navigator.prototype.getBattery")
    page.goto(address_of(fleet))
    page.wait_for_selector("#plugged-row:visible")
    assert page.is_disabled("#button")
    page.check("#says-plugged")
    page.click("#button:enabled")
    page.wait_for_selector("#state[data-state=joined]")


def test_the_data_limit_ends_a_stay_and_a_higher_one_begins_another(
    page: Page, fleet: Fleet, told: SimpleQueue[events.AnyEvent]
) -> None:
    lend(page, fleet)
    joined(told)
    limit_data(page, "1000")
    page.wait_for_selector("#reason:has-text('data limit')")
    assert page.inner_text("#state") == "Paused"
    assert "data limit" in left(told).reason
    page.select_option("#data-choice", "Infinity")
    page.wait_for_selector("#state[data-state=joined]")


def test_the_data_limit_counts_all_stays(page: Page, fleet: Fleet, told: SimpleQueue[events.AnyEvent]) -> None:
    page.add_init_script(VISIBILITY)
    lend(page, fleet)
    joined(told)
    page.evaluate("hide(true)")
    left(told)
    page.wait_for_selector("#down:not(:text-is('0 MB'))")
    page.evaluate("hide(false)")
    page.wait_for_selector("#state[data-state=joined]")
    limit_data(page, "1e6 * (parseFloat(get('down')) + parseFloat(get('up')))")
    page.wait_for_selector("#reason:has-text('data limit')")


def limit_data(page: Page, bytes_of: str) -> None:
    page.evaluate(
        f"""() => {{
            const get = (id) => document.getElementById(id).textContent;
            const choice = document.getElementById("data-choice");
            choice.append(new Option("little", String(({bytes_of}) / 1e9), false, true));
            choice.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }}"""
    )


def test_another_amount_of_memory_is_lent_at_once(page: Page, fleet: Fleet, told: SimpleQueue[events.AnyEvent]) -> None:
    lend(page, fleet)
    page.select_option("#memory-choice", "0.25")
    joined(told)
    assert "memory" in left(told).reason
    assert joined(told).memory_bytes == 250_000_000


def test_over_plain_http_the_page_does_what_remains_and_says_what_is_missing(page: Page, fleet: Fleet) -> None:
    """What a phone gets that scans the code of a server without TLS."""
    page.goto(address_of(fleet).replace("127.0.0.1", ELSEWHERE))
    assert not page.evaluate("isSecureContext")
    for missing in ("graphics processor", "battery", "screen", "--tls"):
        assert missing in page.inner_text("#tls")
    assert page.is_disabled("#button"), "this browser cannot tell whether the device is plugged in"
    page.check("#says-plugged")
    page.click("#button:enabled")
    page.wait_for_selector("#state[data-state=joined]")
    assert fleet.devices[0].kernel.startswith("wasm")


def test_over_tls_the_browser_says_more_even_if_its_user_accepted_the_certificate(page: Page) -> None:
    with Fleet.serve("127.0.0.1:0", token=TOKEN, tls=True) as fleet:
        page.goto(address_of(fleet).replace("127.0.0.1", ELSEWHERE))
        assert page.evaluate("isSecureContext && 'gpu' in navigator && 'wakeLock' in navigator")
        assert page.is_hidden("#tls")
        page.click("#button:enabled")
        page.wait_for_selector("#state[data-state=joined]")
        page.goto("about:blank")


def test_the_page_is_reached_by_keyboard(page: Page, fleet: Fleet) -> None:
    page.goto(address_of(fleet))
    page.wait_for_selector("#button:enabled")
    controls = page.evaluate(
        """[...document.querySelectorAll("button, input, select")]
            .filter((one) => one.checkVisibility()).map(({ id }) => id)"""
    )
    assert by_keyboard(page) == controls
    page.focus("#button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state[data-state=joined]")
    page.keyboard.press("Space")
    page.wait_for_selector("#state[data-state=away]")


def test_a_wrong_token_is_refused_with_a_sentence(page: Page, fleet: Fleet) -> None:
    page.goto(f"{fleet.url.split('#')[0]}/join#wrong".replace("ws://", "http://", 1))
    page.click("#button:enabled")
    page.wait_for_selector("#reason:has-text('token')")
    assert not fleet.devices


def test_products_on_the_graphics_processor_are_right(page: Page, fleet: Fleet) -> None:
    """On the software adapter: slow, so the blocks are small, but it computes as a real one does."""
    page.goto(address_of(fleet))
    worst = page.evaluate(
        """async () => {
            const { Gpu } = await import("/web/device/gpu.mjs");
            const { Matrix } = await import("/web/device/kernel.mjs");
            const gpu = await Gpu.open({ any: true });
            if (!gpu) return null;
            const memory = new Float32Array(40000).map((_, i) => Math.sin(i));
            let worst = 0;
            for (const [m, n, k] of [[1, 1, 1], [5, 70, 33], [65, 64, 17]]) {
                const a = new Matrix(4, m, k), at = new Matrix(8, k, m);
                const b = new Matrix(40000, k, n), bt = new Matrix(40000, n, k);
                for (const [x, y] of [[a, b], [a, bt.T], [at.T, b]]) {
                    const found = await gpu.product(memory.buffer, x, y);
                    const get = (z, i, j) => memory[z.at / 4 + i * z.rowStep + j * z.colStep];
                    for (let i = 0; i < m; i++) for (let j = 0; j < n; j++) {
                        let sum = 0;
                        for (let l = 0; l < k; l++) sum += get(x, i, l) * get(y, l, j);
                        worst = Math.max(worst, Math.abs(sum - found[i * n + j]));
                    }
                }
            }
            return worst;
        }"""
    )
    assert worst is not None, "this Chromium has no WebGPU adapter, not even in software"
    assert worst < 1e-5


def test_what_a_graphics_processor_cannot_do_the_kernel_does(page: Page, fleet: Fleet) -> None:
    page.goto(address_of(fleet))
    found = page.evaluate(
        """async () => {
            const { Kernel } = await import("/web/device/kernel.mjs");
            const { Gpu } = await import("/web/device/gpu.mjs");
            const read = async (file) => (await fetch(`/web/device/${file}`)).arrayBuffer();
            const kernel = await Kernel.load(read, 1 << 26);
            kernel.gpu = await Gpu.open({ any: true });
            if (!kernel.gpu) return null;
            const rows = 64 * 65536; // more workgroups than WebGPU can start, so the command is dropped
            const [a, b, c] = [kernel.zeros(rows, 1), kernel.zeros(1, 1), kernel.zeros(rows, 1)];
            kernel.call.fill(a.at, 2, rows);
            kernel.call.fill(b.at, 3, 1);
            await kernel.multiply(c, a, b, false, () => undefined, 0);
            return [...new Set(kernel.numbers(c))];
        }"""
    )
    assert found is not None, "this Chromium has no WebGPU adapter, not even in software"
    assert found == [6]


def test_a_browser_with_a_graphics_processor_trains_the_same(page: Page, fleet: Fleet, plain: list[float]) -> None:
    lend(page, fleet, "?any-gpu")
    assert close_to(losses(distribute(make("llama"), fleet, grain="gemm")), plain)
    assert any(device.kernel.startswith("webgpu") for device in fleet.devices)


def test_a_phone_need_not_scroll_sideways(page: Page, fleet: Fleet) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    lend(page, fleet)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(scheme: Literal["light", "dark"], page: Page, fleet: Fleet) -> None:
    page.emulate_media(color_scheme=scheme)
    lend(page, fleet)
    assert complaints(page) == []
