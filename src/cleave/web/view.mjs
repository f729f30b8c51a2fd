// The dashboard: follows a run's events, and asks the server what its fleet is doing.

import { drawLines, drawTiling, number } from "./view/charts.mjs";
import { History } from "./view/history.mjs";

const ASK_MS = 2000;
const DRAW_MS = 500;
const MOST_ROWS = 200;
const MOST_LINES = 200;

let history = new History();
let token = decodeURIComponent(location.hash.slice(1));
let isDirty = true;
let isLive = true;
/** @type {any} */
let status = null;
/** @type {import("./view/charts.mjs").Tiling | null} */
let plan = null;

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = /** @type {HTMLInputElement} */ (get("token")).value.trim();
  get("ask").hidden = true;
  void follow();
});
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
      const [found, tiles] = await Promise.all([ask("/api/status"), ask("/api/plan")]);
      status = found.ok ? await found.json() : null;
      if (found.ok && status === null) {
        isLive = false; // there is a log, and no server
        return;
      }
      plan = tiles.ok ? await tiles.json() : null;
    } catch {
      status = plan = null;
    }
    isDirty = true;
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}

/** @param {string} path */
function ask(path) {
  return fetch(path, token ? { headers: { Authorization: `Bearer ${token}` } } : {});
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
    ...(energy ? { Energy: `${(energy.energy_j / 3.6e6).toPrecision(3)} kWh` } : {}),
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
  fleet();
  get("plan-section").hidden = !plan?.tiles.length;
  if (plan?.tiles.length) {
    drawTiling(get("plan"), plan);
    get("plan-note").textContent =
      `Chunks of ${plan.chunk} tokens; predicted ${number(plan.predicted_s)} s per step; the limit is ${plan.limit}.`;
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
    ? ["Device", "Trust", "Kernel", "GFLOP/s", "Down", "Up", "Tasks", "Verified", "Wrong", "State"]
    : ["Device", "Kernel", "GFLOP/s", "Down", "Up", "State"];
  if (status) {
    const devices = [...status.devices].sort((a, b) => b.done_flops - a.done_flops);
    rows = devices.map((one) => [
      one.device, one.trust, one.kernel, giga(one.flops_per_s), rate(one.down_bytes_per_s), rate(one.up_bytes_per_s),
      one.tasks.toLocaleString(), `${giga(one.verified_flops)} G`, String(one.wrong), one.idle_reason || "working",
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
