// The golden frames of the protocol (tests/vectors), and a device in this process that they are played to.

import { readdirSync, readFileSync } from "node:fs";
import { readFile } from "node:fs/promises";

import { Kernel } from "../../src/cleave/web/device/kernel.mjs";
import { decode, encode, Float } from "../../src/cleave/web/device/msgpack.mjs";
import { Session } from "../../src/cleave/web/device/session.mjs";

const VECTORS = new URL("../vectors/", import.meta.url);
const DEVICE = new URL("../../src/cleave/web/device/", import.meta.url);

/** @param {string} kind */
export function casesOf(kind) {
  const folder = new URL(`${kind}/`, VECTORS);
  return readdirSync(folder).sort().map((file) => JSON.parse(readFileSync(new URL(file, folder), "utf8")));
}

/** @param {string} hex */
export function bytesOf(hex) {
  return Uint8Array.from(Buffer.from(hex, "hex"));
}

/** @param {Uint8Array} bytes */
export function hexOf(bytes) {
  return Buffer.from(bytes).toString("hex");
}

/** @param {string} hex */
export function floatsOf(hex) {
  return new Float32Array(bytesOf(hex).buffer);
}

/**
 * @param {(string | number)[][]} rows
 */
export function matrixOf(rows) {
  const numbers = rows.flat().map((entry) => (typeof entry === "number" ? entry : Number(entry.replace("inf", "Infinity"))));
  return { rows: rows.length, cols: rows[0].length, numbers: Float32Array.from(numbers) };
}

export function loadKernel() {
  return Kernel.load((file) => readFile(new URL(file, DEVICE)), 1 << 20);
}

/**
 * JSON for the encoder, which wants to know what is a float.
 * @param {any} value
 * @returns {any}
 */
function packable(value) {
  if (typeof value === "number") return Number.isInteger(value) ? value : new Float(value);
  if (Array.isArray(value)) return value.map(packable);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, packable(entry)]));
}

/** A session whose answers can be awaited one after another. */
export class Played {
  /** @type {{header: any, payload: Uint8Array, bytes: Uint8Array}[]} */
  answers = [];
  /** @type {any} */
  ending = null;
  #missing = 0;

  /**
   * @param {Kernel} kernel
   * @param {{name?: string, memoryBytes?: number, flopsPerS?: number}} [offer]
   * @param {{now?: () => number, pause?: () => Promise<void>,
   *   credited?: (done: number, verified: number) => void}} [clock]
   */
  constructor(kernel, { name = "d", memoryBytes = 1 << 20, flopsPerS = 1 } = {}, clock = {}) {
    const outside = {
      send: (/** @type {Uint8Array} */ bytes) => this.#take(bytes.slice()),
      unsentBytes: () => 0,
      now: () => performance.now() / 1000,
      pause: () => new Promise((resolve) => setImmediate(resolve)),
      welcomed: () => {},
      idle: () => {},
      ended: (/** @type {any} */ how) => { this.ending = how; },
      ...clock,
    };
    this.session = new Session(kernel, { name, token: "", flopsPerS, memoryBytes }, /** @type {any} */ (outside));
  }

  /** @param {any} frame */
  play(frame) {
    this.session.receive(bytesOf(frame.header_hex));
    if (frame.payload_hex) this.session.receive(bytesOf(frame.payload_hex));
  }

  /**
   * Ask for a program that is in no vector.
   * @param {number} task
   * @param {any} program
   */
  run(task, program) {
    this.session.receive(encode({ type: "run", payload: 0, task, priority: 1, program: packable(program), format: "fp32" }));
  }

  /** Welcome the device, as every server does first. */
  welcome() {
    this.play(casesOf("messages").find((one) => one.name === "welcome"));
  }

  /** @param {Uint8Array} bytes */
  #take(bytes) {
    if (this.#missing) {
      const last = this.answers[this.answers.length - 1];
      last.payload = Buffer.concat([last.payload, bytes]);
      this.#missing -= bytes.length;
      return;
    }
    const header = /** @type {any} */ (decode(bytes));
    this.#missing = header.payload;
    this.answers.push({ header, payload: new Uint8Array(), bytes });
  }

  /** Let everything that is ready be computed. */
  async settle() {
    let before = -1;
    for (let quiet = 0; quiet < 3; quiet = this.answers.length === before ? quiet + 1 : 0) {
      before = this.answers.length;
      await new Promise((resolve) => setImmediate(resolve));
    }
    if (this.ending && !this.ending.expected && this.ending.reason !== "done") throw new Error(this.ending.reason);
  }
}
