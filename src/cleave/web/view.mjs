// The dashboard: follows a run's events, and asks the server what its fleet is doing.

import { drawLines, drawTiling, drawTimeline, number } from "./view/charts.mjs";
import { tokenOf } from "./token.mjs";
import { History } from "./view/history.mjs";

const ASK_MS = 2000;
const DRAW_MS = 500;
const MOST_ROWS = 200;
const MOST_LINES = 200;

let history = new History();
let token = tokenOf(location.hash);
let isDirty = true;
let isLive = true;
/** @type {any} */
let status = null;
/** @type {{pass: import("./view/charts.mjs").Tiling | null, product: import("./view/charts.mjs").Tiling | null} | null} */
let plan = null;
/** @type {import("./view/charts.mjs").Activity | null} */
let activity = null;
/** @type {{text: string, change: number}[] | null} */
let advice = null;

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = tokenOf(`#${/** @type {HTMLInputElement} */ (get("token")).value.trim()}`);
  get("ask").hidden = true;
  void follow();
});
get("order-buttons").addEventListener("click", ({ target }) => {
  if (target instanceof HTMLButtonElement && target.dataset.order) void order(target.dataset.order);
});
get("order-device").addEventListener("change", () => { isDirty = true; });
addEventListener("resize", () => { isDirty = true; });
setInterval(draw, DRAW_MS);
void follow();
void watch();

/** Read the event log, and what is appended to it, for as long as the server is there. */
async function follow() {
  for (;;) {
    try {
      const answer = await ask("/api/events");
      if (answer.status === 401 || answer.status === 403) {
        setState("waiting", "This server asks for an admin token");
        get("ask").hidden = false;
        return;
      }
      if (answer.status === 404) {
        setState("joined", "This run keeps no events");
        return;
      }
      if (answer.ok && answer.body) {
        history = new History();
        setState("joined", "Live");
        await read(answer.body);
      }
      if (history.finished || !isLive) {
        setState("away", "Finished");
        return;
      }
    } catch {
      // the server is gone; it may come back
    }
    if (history.finished) {
      setState("away", "Finished");
      return;
    }
    setState("connecting", "No answer from the server; trying again");
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}

/** @param {ReadableStream<Uint8Array>} body */
async function read(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let torn = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (torn + decoder.decode(value, { stream: true })).split("\n");
    torn = /** @type {string} */ (lines.pop());
    for (const line of lines) {
      if (!line.trim()) continue;
      try {
        history.add(JSON.parse(line));
      } catch {
        continue; // torn by a crash
      }
    }
    isDirty = true;
  }
}

/** Ask for the fleet's state while the server answers. */
async function watch() {
  for (;;) {
    try {
      const [found, ...more] = await Promise.all(["/api/status", "/api/plan", "/api/activity", "/api/advice"].map((path) => ask(path)));
      status = found.ok ? await found.json() : null;
      if (found.ok && status === null) {
        isLive = false; // there is a log, and no server
        return;
      }
      [plan, activity, advice] = await Promise.all(more.map((answer) => (answer.ok ? answer.json() : null)));
    } catch {
      status = plan = activity = advice = null;
    }
    isDirty = true;
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 */
function ask(path, options = {}) {
  return fetch(path, token ? { ...options, headers: { Authorization: `Bearer ${token}` } } : options);
}

/**
 * Give an order about the chosen device, or about the token it joined with.
 * @param {string} what
 */
async function order(what) {
  const device = /** @type {HTMLSelectElement} */ (get("order-device")).value;
  const to = what === "revoke" ? tokenIdOf(device) : device;
  if (what === "ban" && !confirm(`Ban ${device} for the rest of this run?`)) return;
  if (what === "revoke" && !confirm(`Revoke the token of ${device}, and disconnect every device that joined with it?`)) return;
  const answer = await ask("/api/orders", { method: "POST", body: JSON.stringify({ do: what, to }) }).catch(() => null);
  const said = { pause: "is paused", resume: "may join again", drain: "leaves when the step is over", ban: "is banned", revoke: "can no longer join: its token is revoked" };
  if (answer?.ok) get("order-note").textContent = `${device} ${said[/** @type {keyof typeof said} */ (what)]}.`;
  else get("order-note").textContent = answer ? await answer.text() : "No answer from the server.";
}

/** @param {string} device */
function tokenIdOf(device) {
  return status?.devices.find((/** @type {any} */ one) => one.device === device)?.token ?? "";
}

function draw() {
  if (!isDirty || document.visibilityState !== "visible") return;
  isDirty = false;
  const { started, steps, evaluations, energy } = history, last = steps[steps.length - 1];
  get("title").textContent = started ? `${started.model}` : "Cleave";
  figures({
    Step: last ? `${last.step} of ${started?.steps ?? "?"}` : "none yet",
    Loss: last ? number(last.loss) : "–",
    "Tokens/s": history.tokensPerS ? Math.round(history.tokensPerS).toLocaleString() : "–",
    "Seconds per step": last ? number(last.seconds) : "–",
    Predicted: last?.predicted ? `${number(last.predicted)} (${(last.seconds / last.predicted).toFixed(2)}×)` : "–",
    Devices: String(status ? status.devices.length : [...history.devices.values()].filter(({ isHere }) => isHere).length),
    Down: bytes(status?.down_bytes ?? history.downBytes),
    Up: bytes(status?.up_bytes ?? history.upBytes),
    ...(energy ? { Energy: `${number(energy.energy_j / 3.6e6)} kWh`, Emissions: `${number(1000 * energy.kgco2e)} g CO₂e` } : {}),
  });
  get("grain").textContent = history.paused || (history.grain && `grain ${history.grain}`);
  drawLines(get("loss"), "loss", [
    { name: "training", className: "first", points: steps.map(({ step, loss }) => [step, loss]) },
    { name: "evaluation", className: "second", points: evaluations.map(({ step, loss }) => [step, loss]) },
  ]);
  drawLines(get("time"), "seconds per step", [
    { name: "measured", className: "first", points: steps.map(({ step, seconds }) => [step, seconds]) },
    { name: "predicted", className: "second", points: steps.map(({ step, predicted }) => [step, predicted ?? NaN]) },
  ]);
  const hints = advice?.map(({ text, change }) => textOf("li", `${text}: ${Math.round(100 * change)} % per step (predicted)`)) ?? [];
  get("advice").replaceChildren(...hints);
  get("advice").hidden = !hints.length;
  fleet();
  orders();
  get("timeline-section").hidden = !activity;
  if (activity) {
    drawTimeline(get("timeline"), activity);
    get("timeline-note").textContent = activity.is_cut ? "Only the first results of this step are shown." : "";
  }
  const tiling = plan?.pass ?? plan?.product;
  get("plan-section").hidden = !tiling?.tiles.length;
  if (tiling?.tiles.length) {
    drawTiling(get("plan"), tiling);
    get("plan-heading").textContent = `${plan?.pass ? "Plan of the step" : "Plan of the latest product"}: ${tiling.across} across, ${tiling.down} down`;
    get("plan-note").textContent = tiling.note;
  }
  events();
}

/** @param {{[name: string]: string}} shown */
function figures(shown) {
  get("figures").replaceChildren(...Object.entries(shown).map(([name, text]) => {
    const group = document.createElement("div");
    group.append(textOf("dt", name), textOf("dd", text));
    return group;
  }));
}

function fleet() {
  /** @type {[string, ...string[]][]} */
  let rows;
  const head = status
    ? ["Device", "Trust", "Kernel", "GFLOP/s", "Down", "Up", "Share", "Tasks", "Verified", "Wrong", "State"]
    : ["Device", "Kernel", "GFLOP/s", "Down", "Up", "State"];
  if (status) {
    const devices = [...status.devices].sort((a, b) => b.done_flops - a.done_flops);
    const all = devices.reduce((total, { done_flops }) => total + done_flops, 0) || 1;
    rows = devices.map((one) => [
      one.device, one.trust, one.kernel, giga(one.flops_per_s), rate(one.down_bytes_per_s), rate(one.up_bytes_per_s),
      `${Math.round((100 * one.done_flops) / all)}%`, one.tasks.toLocaleString(), `${giga(one.verified_flops)} GFLOP`,
      String(one.wrong), one.is_late ? "late" : one.is_leaving ? "leaves after this step" : one.idle_reason || (one.tasks ? "working" : "no work yet"),
    ]);
  } else {
    rows = [...history.devices].map(([name, { event, isHere }]) => [
      name, event.kernel, giga(event.flops_per_s), rate(event.down_bytes_per_s), rate(event.up_bytes_per_s),
      isHere && !history.finished ? "connected" : "left",
    ]);
  }
  const table = get("fleet"), header = document.createElement("tr");
  header.append(...head.map((name) => Object.assign(textOf("th", name), { scope: "col" })));
  table.replaceChildren(header, ...rows.slice(0, MOST_ROWS).map(([name, ...cells]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(textOf("th", name), { scope: "row" }), ...cells.map((cell) => textOf("td", cell)));
    return row;
  }));
  get("fleet-note").textContent = rows.length > MOST_ROWS ? `${rows.length - MOST_ROWS} more devices.` : rows.length ? "" : "No device yet.";
}

/** Offer orders to whoever showed a token; the list changes only with the fleet, as somebody may be choosing. */
function orders() {
  get("orders").hidden = !(token && status);
  if (get("orders").hidden) return;
  const choice = /** @type {HTMLSelectElement} */ (get("order-device"));
  const here = status.devices.map((/** @type {any} */ one) => one.device).sort();
  const away = status.paused.filter((/** @type {string} */ name) => !here.includes(name));
  const options = [...here.map((/** @type {string} */ name) => [name, name]), ...away.map((/** @type {string} */ name) => [name, `${name} (paused)`])];
  if (choice.dataset.shown !== JSON.stringify(options)) {
    const chosen = choice.value;
    choice.replaceChildren(...options.map(([name, label]) => new Option(label, name, false, name === chosen)));
    choice.dataset.shown = JSON.stringify(options);
  }
  for (const button of get("order-buttons").querySelectorAll("button")) {
    const isPaused = away.includes(choice.value), what = button.dataset.order;
    button.disabled = !choice.value || isPaused !== (what === "resume") || (what === "revoke" && !tokenIdOf(choice.value));
  }
}

function events() {
  get("events").replaceChildren(...history.lines.slice(-MOST_LINES).reverse().map(({ timeS, text, kind }) => {
    const line = document.createElement("li");
    line.className = kind;
    line.append(textOf("time", new Date(1000 * timeS).toLocaleTimeString()), ` ${text}`);
    return line;
  }));
}

// ------------------------------------------------------------------------------------------- the document

/** @param {string} id */
function get(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} text
 */
function textOf(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

/**
 * @param {string} state
 * @param {string} text
 */
function setState(state, text) {
  get("state").dataset.state = state;
  get("state").textContent = text;
}

/** @param {number} flops */
function giga(flops) {
  return (flops / 1e9).toLocaleString(undefined, { maximumFractionDigits: 1 });
}

/** @param {number} bytesPerS */
function rate(bytesPerS) {
  return `${((8 * bytesPerS) / 1e6).toLocaleString(undefined, { maximumFractionDigits: 0 })} Mbit/s`;
}

/** @param {number} count */
function bytes(count) {
  return count < 1e9 ? `${(count / 1e6).toFixed(0)} MB` : `${(count / 1e9).toFixed(1)} GB`;
}
