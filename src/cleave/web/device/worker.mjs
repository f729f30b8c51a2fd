// The worker behind the page: owns the kernel and the WebSocket, so that the page stays free to draw.
//
// The page says `join` and `leave`; the worker reports what happens. It redials as the protocol asks: after a lost
// connection, and when a server that pauses or restarts asks to rejoin.

import { Gpu } from "./gpu.mjs";
import { Kernel } from "./kernel.mjs";
import { Session } from "./session.mjs";

/**
 * @typedef {{url: string, token: string, name: string, memoryBytes: number, anyGpu: boolean}} Wish
 *   with `anyGpu` a software adapter will do
 * @typedef {{say: "join", wish: Wish} | {say: "leave", reason: string}} Order
 * @typedef {{tasks: number, flops: number, computeS: number, downBytes: number, upBytes: number}} Done
 * @typedef {{say: "state", state: "measuring" | "connecting" | "joined" | "waiting" | "away", text: string}
 *   | {say: "measured", kernel: string, flopsPerS: number}
 *   | {say: "idle", reason: string}
 *   | {say: "credit", doneFlops: number, verifiedFlops: number}
 *   | {say: "done", done: Done, heldBytes: number, memoryBytes: number}} Report
 */

const FIRST_PAUSE_S = 0.5;
const MOST_PAUSE_S = 30;
const REPORT_MS = 500;
const MEASURE_S = 0.4;
const SIDE = 384;

/** @type {Wish | null} */
let wish = null;
/** @type {Kernel | null} */
let kernel = null;
let flopsPerS = 0;
/** @type {Session | null} */
let session = null;
/** @type {WebSocket | null} */
let socket = null;
let pauseS = FIRST_PAUSE_S;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let redial;
/** Of former sessions. */
const before = { tasks: 0, flops: 0, computeS: 0, downBytes: 0, upBytes: 0 };

self.addEventListener("message", ({ data }) => {
  const order = /** @type {Order} */ (data);
  if (order.say === "join") void join(order.wish);
  else leave(order.reason);
});

setInterval(report, REPORT_MS);

/** @param {Report} what */
function tell(what) {
  self.postMessage(what);
}

/** @param {Wish} wanted */
async function join(wanted) {
  wish = wanted;
  pauseS = FIRST_PAUSE_S;
  if (!kernel) {
    tell({ say: "state", state: "measuring", text: "measuring this device" });
    try {
      kernel = await Kernel.load(read, wanted.memoryBytes);
      kernel.gpu = await Gpu.open({ any: wanted.anyGpu });
    } catch (fault) {
      wish = null;
      tell({ say: "state", state: "away", text: fault instanceof Error ? fault.message : String(fault) });
      return;
    }
    flopsPerS = await measure(kernel, wanted.anyGpu);
    tell({ say: "measured", kernel: kernel.name, flopsPerS });
  }
  dial();
}

/** @param {string} reason */
function leave(reason) {
  report();
  wish = null;
  clearTimeout(redial);
  if (session) session.leave(reason);
  else tell({ say: "state", state: "away", text: reason });
}

function dial() {
  if (!wish || !kernel) return;
  const { url, token, name, memoryBytes } = wish;
  tell({ say: "state", state: "connecting", text: `connecting to ${new URL(url).host}` });
  const link = new WebSocket(url);
  link.binaryType = "arraybuffer";
  const own = new Session(kernel, { name, token, flopsPerS, memoryBytes }, {
    send: (bytes) => {
      if (link.readyState === WebSocket.OPEN) link.send(/** @type {Uint8Array<ArrayBuffer>} */ (bytes));
    },
    unsentBytes: () => link.bufferedAmount,
    now: () => performance.now() / 1000,
    pause,
    welcomed: (given) => tell({ say: "state", state: "joined", text: `joined as ${given}` }),
    idle: (reason) => tell({ say: "idle", reason }),
    credited: (doneFlops, verifiedFlops) => tell({ say: "credit", doneFlops, verifiedFlops }),
    ended: (how) => ended(link, own, how),
  });
  [session, socket] = [own, link];
  link.addEventListener("open", () => own.join());
  link.addEventListener("message", ({ data }) => {
    if (typeof data !== "string") own.receive(new Uint8Array(data));
  });
  link.addEventListener("close", ({ reason }) => {
    const text = reason || `no connection to ${new URL(url).host}`;
    ended(link, own, { reason: text, rejoin: true, isRefused: false });
  });
}

/**
 * @param {WebSocket} link
 * @param {Session} own
 * @param {import("./session.mjs").Ending} how
 */
function ended(link, own, how) {
  if (session !== own) return;
  if (own.done.tasks) pauseS = FIRST_PAUSE_S;
  for (const name of /** @type {(keyof Done)[]} */ (Object.keys(before))) before[name] += own.done[name];
  session = socket = null;
  link.close();
  if (wish && how.rejoin && !how.isRefused) {
    const s = pauseS * (0.8 + 0.4 * Math.random());
    tell({ say: "state", state: "waiting", text: `${how.reason}; trying again in ${s.toFixed(1)} s` });
    redial = setTimeout(dial, 1000 * s);
    pauseS = Math.min(2 * pauseS, MOST_PAUSE_S);
  } else {
    wish = null;
    tell({ say: "state", state: "away", text: how.reason });
  }
}

function report() {
  if (!wish) return;
  const done = { ...before };
  if (session) for (const name of /** @type {(keyof Done)[]} */ (Object.keys(done))) done[name] += session.done[name];
  tell({ say: "done", done, heldBytes: session?.heldBytes ?? 0, memoryBytes: wish.memoryBytes });
}

/** @param {string} file */
async function read(file) {
  const answer = await fetch(new URL(file, import.meta.url));
  if (!answer.ok) throw new Error(`cannot load ${file}: ${answer.status} ${answer.statusText}`);
  return answer.arrayBuffer();
}

/**
 * Operations per second in products, best of several.
 * @param {Kernel} measured
 * @param {boolean} isForced  whether even small products must go to the graphics processor
 */
async function measure(measured, isForced) {
  const side = measured.gpu && !isForced ? 4 * SIDE : SIDE;
  const [a, b, c] = [0, 1, 2].map(() => measured.zeros(side, side));
  let bestS = Infinity;
  for (const stop = performance.now() + 1000 * MEASURE_S; performance.now() < stop; ) {
    const start = performance.now();
    await measured.multiply(c, a, b.T, false, () => undefined);
    bestS = Math.min(bestS, Math.max(performance.now() - start, 0.01) / 1000);
  }
  [a, b, c].forEach((matrix) => measured.free(matrix));
  return (2 * side ** 3) / bestS;
}

const turn = new MessageChannel();
/** @type {(() => void)[]} */
const turns = [];
turn.port2.onmessage = () => turns.shift()?.();

/** Let messages in: a turn of the event loop, without the delay of timers. */
function pause() {
  return /** @type {Promise<void>} */ (new Promise((resolve) => {
    turns.push(resolve);
    turn.port1.postMessage(null);
  }));
}
