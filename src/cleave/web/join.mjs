// The page of a device: one button, the volunteer's terms, and what the device does. The worker does the work.

import { abilitiesOf, objection } from "./terms.mjs";
import { tokenOf } from "./token.mjs";

/** @typedef {import("./device/worker.mjs").Report} Report */
/** @typedef {import("./device/worker.mjs").Done} Done */
/** @typedef {{charging: boolean, addEventListener: (event: string, act: () => void) => void}} Battery */
/** @typedef {{released: boolean, release: () => Promise<void>}} WakeLock */

const GB = 1e9;
const MEMORY_GB = [0.25, 0.5, 1, 2, 3];
const DATA_GB = [0.1, 0.5, 1, 5, 20, Infinity];

const [battery, connection] = await Promise.all([batteryOf(), connectionOf()]);
const isPhone = matchMedia("(pointer: coarse)").matches;
/** @type {Worker | null} */
let worker = null;
let isWanted = false;
/** @type {WakeLock | null} */
let wakeLock = null;
let isAskingToStayAwake = false;
let lentBytes = 0;
/** @type {Map<Worker, Done>} What each worker of this page did: one ends whenever the device leaves. */
const doneBy = new Map();

const button = /** @type {HTMLButtonElement} */ (get("button"));
get("server").textContent = location.host;
get("name").textContent = nameOf();
get("saving-row").hidden = !connection?.saveData;
get("tls").hidden = isSecureContext;
fill("memory-choice", MEMORY_GB, defaultMemory(), (gb) => (gb < 1 ? `${1000 * gb} MB` : `${gb} GB`));
fill("data-choice", DATA_GB, isPhone ? 1 : Infinity, (gb) => (gb === Infinity ? "none" : gb < 1 ? `${1000 * gb} MB` : `${gb} GB`));
for (const { name, is, text } of abilitiesOf({
  isSecure: isSecureContext,
  hasBattery: battery !== null,
  hasWakeLock: "wakeLock" in navigator,
  tellsSaving: connection !== null,
})) {
  const item = document.createElement("li"), heading = document.createElement("b"), words = document.createElement("span");
  heading.textContent = `${{ yes: "✓", no: "✗", ask: "?" }[is]} ${name}`;
  words.textContent = text;
  item.append(heading, words);
  get("abilities").append(item);
}

button.addEventListener("click", () => {
  isWanted = !isWanted;
  obey();
});
document.addEventListener("visibilitychange", obey);
battery?.addEventListener("chargingchange", obey);
connection?.addEventListener?.("change", obey);
addEventListener("change", obey); // of a term
addEventListener("pagehide", () => worker?.postMessage({ say: "leave", reason: "its page was closed" }));
obey();

/** Join or leave, as the owner's wish and terms demand. */
function obey() {
  const why = objection(
    {
      onlyCharging: isChecked("only-charging"),
      saysPlugged: isChecked("says-plugged"),
      inBackground: isChecked("in-background"),
      evenSavingData: isChecked("even-saving"),
      dataBytes: GB * Number(valueOf("data-choice")),
    },
    {
      isCharging: battery?.charging ?? null,
      isVisible: document.visibilityState === "visible",
      savesData: connection?.saveData ?? null,
      movedBytes: total("downBytes") + total("upBytes"),
    },
  );
  if (worker && (!isWanted || why)) leave(why ?? "stopped by its owner");
  else if (worker && lentBytes !== chosenBytes()) leave("its owner lends another amount of memory from now on");
  if (isWanted && !why && !worker) join();
  if (worker) void stayAwake();
  get("plugged-row").hidden = battery !== null || !isChecked("only-charging");
  button.disabled = !isWanted && why !== null;
  button.textContent = isWanted ? "Stop" : "Lend this device";
  button.classList.toggle("stop", isWanted);
  if (!worker && why) get("reason").textContent = isWanted ? `Paused: ${why}.` : `Not now: ${why}.`;
  else if (!isWanted && !worker) get("reason").textContent = "";
}

function join() {
  const own = worker = new Worker(new URL("./device/worker.mjs", import.meta.url), { type: "module" });
  own.addEventListener("message", ({ data }) => {
    const report = /** @type {Report} */ (data);
    if (report.say === "done") note(own, report.done);
    if (worker === own) show(report); // a former one may still say that it left
  });
  own.addEventListener("error", ({ message }) => {
    if (worker === own) end(`this browser cannot run the device: ${message}`);
  });
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  lentBytes = chosenBytes();
  worker.postMessage({
    say: "join",
    wish: {
      url: `${scheme}://${location.host}/ws`,
      token: tokenOf(location.hash),
      name: nameOf(),
      memoryBytes: lentBytes,
      anyGpu: new URLSearchParams(location.search).has("any-gpu"),
    },
  });
  get("reason").textContent = "";
}

/**
 * Hand work back, and free the memory with the worker.
 * @param {string} reason
 */
function leave(reason) {
  const leaving = worker;
  worker = null;
  leaving?.postMessage({ say: "leave", reason });
  setTimeout(() => leaving?.terminate(), 500);
  setState("away", isWanted ? "Paused" : "Not joined");
  void wakeLock?.release();
  wakeLock = null;
}

/** @param {string} reason */
function end(reason) {
  isWanted = false;
  worker?.terminate();
  worker = null;
  setState("away", "Not joined");
  obey();
  get("reason").textContent = sentence(reason);
}

/** @param {Report} report */
function show(report) {
  switch (report.say) {
    case "state":
      if (report.state === "away") end(report.text);
      else {
        setState(report.state, sentence(report.text));
        if (report.state === "joined") get("reason").textContent = "";
      }
      break;
    case "measured":
      get("speed").textContent = `${(report.flopsPerS / GB).toFixed(1)} GFLOP/s`;
      get("speed").title = report.kernel;
      break;
    case "credit":
      get("accepted").textContent = gigaflop(report.doneFlops);
      get("verified").textContent = gigaflop(report.verifiedFlops);
      break;
    case "idle": get("reason").textContent = `No work for this device now: ${report.reason}`; break;
    case "done": {
      const { flops, computeS } = report.done;
      if (computeS > 1) get("speed").textContent = `${(flops / computeS / GB).toFixed(1)} GFLOP/s`;
      get("memory").textContent = `${megabytes(report.heldBytes)} of ${megabytes(report.memoryBytes)}`;
      obey(); // the data limit
    }
  }
}

/**
 * Add what a worker did to what the others did.
 * @param {Worker} own
 * @param {Done} done
 */
function note(own, done) {
  const before = total("tasks");
  doneBy.set(own, done);
  const tasks = total("tasks");
  if (worker === own && tasks > before) get("reason").textContent = ""; // it said why there was no work
  get("tasks").textContent = tasks.toLocaleString();
  get("flops").textContent = gigaflop(total("flops"));
  get("down").textContent = megabytes(total("downBytes"));
  get("up").textContent = megabytes(total("upBytes"));
}

/**
 * What this page did since it was opened.
 * @param {keyof Done} what
 */
function total(what) {
  return [...doneBy.values()].reduce((sum, done) => sum + done[what], 0);
}

function chosenBytes() {
  return GB * Number(valueOf("memory-choice"));
}

/**
 * @param {string} state
 * @param {string} text
 */
function setState(state, text) {
  get("state").dataset.state = state;
  get("state").textContent = text;
}

/** Keep the screen on, again whenever the browser gave that up: it does while the page is hidden. */
async function stayAwake() {
  if (isAskingToStayAwake || (wakeLock && !wakeLock.released) || document.visibilityState !== "visible") return;
  isAskingToStayAwake = true;
  try {
    /** @type {WakeLock | null} */
    const lock = (await /** @type {any} */ (navigator).wakeLock?.request("screen")) ?? null;
    if (worker) wakeLock = lock;
    else void lock?.release();
  } catch {
    // refused, for example with little battery; the page works without
  } finally {
    isAskingToStayAwake = false;
  }
}

// ------------------------------------------------------------------------------------------- the browser

/** @returns {Promise<Battery | null>} */
async function batteryOf() {
  try {
    return (await /** @type {any} */ (navigator).getBattery?.()) ?? null;
  } catch {
    return null;
  }
}

/** @returns {Promise<{saveData: boolean, addEventListener?: (event: string, act: () => void) => void} | null>} */
async function connectionOf() {
  const found = /** @type {any} */ (navigator).connection;
  return typeof found?.saveData === "boolean" ? found : null;
}

function defaultMemory() {
  const gb = /** @type {any} */ (navigator).deviceMemory ?? (isPhone ? 2 : 4);
  return MEMORY_GB.findLast((choice) => choice <= gb / 8) ?? MEMORY_GB[0];
}

function nameOf() {
  const agent = navigator.userAgent;
  const [, system] = /(Android|iPhone|iPad|Windows|Mac|CrOS|Linux)/.exec(agent) ?? ["", "browser"];
  const [, browser] = /(Firefox|Edg|Chrome|Safari)/.exec(agent) ?? ["", ""];
  return `${system} ${browser === "Edg" ? "Edge" : browser}`.trim();
}

// ------------------------------------------------------------------------------------------- the document

/** @param {string} id */
function get(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** @param {string} id */
function isChecked(id) {
  return /** @type {HTMLInputElement} */ (get(id)).checked;
}

/** @param {string} id */
function valueOf(id) {
  return /** @type {HTMLSelectElement} */ (get(id)).value;
}

/**
 * @param {string} id
 * @param {number[]} choices
 * @param {number} chosen
 * @param {(choice: number) => string} format
 */
function fill(id, choices, chosen, format) {
  for (const choice of choices) get(id).append(new Option(format(choice), String(choice), false, choice === chosen));
}

/** @param {number} flops */
function gigaflop(flops) {
  const giga = flops / GB;
  return `${giga.toLocaleString(undefined, { maximumFractionDigits: giga < 10 ? 1 : 0 })} GFLOP`;
}

/** @param {number} bytes */
function megabytes(bytes) {
  return bytes < GB ? `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB` : `${Number((bytes / GB).toFixed(2))} GB`;
}

/** @param {string} text */
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
