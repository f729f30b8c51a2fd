// What the dashboard makes of a run's events.

import assert from "node:assert/strict";
import { test } from "node:test";

import { number, ticks } from "../../src/cleave/web/view/charts.mjs";
import { describe, History, thinned } from "../../src/cleave/web/view/history.mjs";

/** @param {number} number */
function step(number, loss = 1) {
  return { event: "step_done", time_s: number, step: number, loss, seconds: 2, predicted_s: 1.5, tokens: 100, down_bytes: 10, up_bytes: 5 };
}

test("adds up steps, devices and bytes", () => {
  const history = new History();
  history.add({ event: "run_started", time_s: 0, model: "m", steps: 3, tokens_per_step: 100 });
  history.add({ event: "device_joined", time_s: 0, device: "a", flops_per_s: 1e9, kernel: "numpy" });
  for (const number of [1, 2]) history.add(step(number));
  history.add({ event: "device_left", time_s: 3, device: "a", reason: "power", lost_tasks: 2 });
  assert.equal(history.tokensPerS, 50);
  assert.deepEqual([history.downBytes, history.upBytes], [20, 10]);
  assert.equal(history.devices.get("a")?.isHere, false);
  assert.match(history.lines[history.lines.length - 1].text, /a left: power; 2 tasks/);
});

test("a loss that diverged is shown as such", () => {
  const history = new History();
  history.add(JSON.parse(JSON.stringify(step(1, NaN))));
  history.add({ event: "evaluated", time_s: 2, step: 1, loss: null });
  assert.equal(number(history.steps[0].loss), "NaN");
  assert.equal(number(history.evaluations[0].loss), "NaN");
});

test("a run that goes back forgets the steps it undid", () => {
  const history = new History();
  for (const number of [1, 2, 3]) history.add(step(number));
  history.add({ event: "rolled_back", time_s: 4, device: "liar", from_step: 3, step: 1 });
  assert.deepEqual(history.steps.map(({ step: one }) => one), [1]);
});

test("keeps the peaks of many points", () => {
  /** @type {[number, number][]} */
  const points = Array.from({ length: 10000 }, (_, i) => [i, i === 7777 ? 99 : Math.sin(i)]);
  const kept = thinned(points, 400);
  assert.ok(kept.length <= 402);
  assert.ok(kept.some(([, y]) => y === 99));
  kept.reduce((before, after) => (assert.ok(before[0] < after[0]), after));
});

test("remembers only the latest of endless events", () => {
  const history = new History();
  for (let i = 0; i < 5000; i++) history.add({ event: "note", time_s: i, text: String(i) });
  assert.ok(history.lines.length <= 1000);
  assert.equal(history.lines[history.lines.length - 1].text, "4999");
});

test("ticks are round and within the range", () => {
  for (const [low, high] of [[0, 1], [2.3, 5.9], [-3, 400], [1e-5, 3e-5]]) {
    const found = ticks(low, high);
    assert.ok(found.length >= 2 && found.length <= 6);
    assert.ok(found.every((tick) => tick >= low - 1e-12 && tick <= high + 1e-12));
  }
  assert.equal(number(0.00012345), "1.2e-4");
});

test("unknown events of later releases are left out", () => {
  assert.equal(describe({ event: "of_the_future", time_s: 0 }), null);
});
