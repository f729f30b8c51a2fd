// One block of a matrix product, computed while its operands arrive and returned in rectangles.
//
// In layout nt the computable part grows as a square; in nn rows follow once b is complete; in tn the block is a sum
// over strips, returned at the end.

import { require } from "../errors.mjs";
import { bands, strips } from "./bands.mjs";
import { Room } from "../kernel.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("../store.mjs").Held} Held */
/** @typedef {import("./task.mjs").Rectangle} Rectangle */
/** @typedef {import("./task.mjs").Chunk} Chunk */

const LEAST_SIDE = 256;
const CHECKED_COLS = 128; // the server checks columns in groups of so many

export class GemmTask {
  #rows = 0;
  #cols = 0;
  #inner = 0;
  /** @type {Rectangle[]} */
  #pending = [];
  /** @type {Matrix | null} */
  #sum = null;

  /**
   * @param {import("./program.mjs").Gemm} program
   * @param {import("../store.mjs").Store} store
   */
  constructor(program, store) {
    this.program = program;
    this.store = store;
  }

  get isFinished() {
    return !this.#pending.length && this.#rows === this.program.rows && this.#cols === this.program.cols;
  }

  dispose() {
    if (this.#sum) this.store.kernel.free(this.#sum);
    this.#sum = null;
  }

  /** @returns {Chunk | null} */
  nextChunk() {
    /** @type {[Held, Held][]} */
    const pairs = [];
    for (const [first, second] of this.program.terms) {
      const a = this.store.get(first), b = this.store.get(second);
      if (!a || !b) return null;
      pairs.push([a, b]);
    }
    this.#check(pairs);
    if (this.program.layout === "tn") return this.#nextSum(...pairs[0]);
    if (!this.#pending.length) this.#grow(pairs);
    const part = this.#pending.shift();
    if (!part) return null;
    const inner = pairs.reduce((total, [a]) => total + a.matrix.cols, 0);
    return { part, flops: 2 * part.rows * part.cols * inner, ...this.#multiply(pairs, part) };
  }

  /** @param {[Held, Held][]} pairs */
  #grow(pairs) {
    const { layout, rows, cols } = this.program;
    const readyRows = Math.min(...pairs.map(([a]) => a.readyRows));
    let readyCols = Math.min(...pairs.map(([, b]) => b.readyRows));
    if (layout === "nn") readyCols = pairs.every(([, b]) => b.readyRows === b.matrix.rows) ? cols : 0;
    if (readyCols < cols) readyCols -= readyCols % CHECKED_COLS;
    const [bottom, right] = [boundary(this.#rows, readyRows, rows), boundary(this.#cols, readyCols, cols)];
    if (bottom * right <= this.#rows * this.#cols) return;
    this.#pending.push(...strips(0, this.#rows, this.#cols, right), ...strips(this.#rows, bottom, 0, right));
    [this.#rows, this.#cols] = [bottom, right];
  }

  /**
   * @param {[Held, Held][]} pairs
   * @param {Rectangle} part
   */
  #multiply(pairs, { top, rows, left, cols }) {
    const { kernel } = this.store, room = new Room(kernel);
    const run = async (/** @type {() => Promise<void> | undefined} */ breathe) => {
      const c = room.matrix(rows, cols);
      let adds = false;
      for (const [a, b] of pairs) {
        const right = this.program.layout === "nt"
          ? b.matrix.view(left, left + cols).T
          : b.matrix.view(0, b.matrix.rows, left, left + cols);
        await kernel.multiply(c, a.matrix.view(top, top + rows), right, adds, breathe);
        adds = true;
      }
      return c;
    };
    return { run, done: () => room.close() };
  }

  /**
   * @param {Held} a
   * @param {Held} b
   * @returns {Chunk | null}
   */
  #nextSum(a, b) {
    const { rows, cols } = this.program, { kernel } = this.store;
    const part = this.#pending.shift();
    if (part) {
      const sum = /** @type {Matrix} */ (this.#sum);
      return { part, flops: 0, run: async () => sum.view(part.top, part.top + part.rows) };
    }
    const start = this.#inner, ready = Math.min(a.readyRows, b.readyRows);
    if (ready === start || (ready < a.matrix.rows && ready - start < LEAST_SIDE)) return null;
    this.#inner = ready;
    if (ready === a.matrix.rows) {
      [this.#rows, this.#cols] = [rows, cols];
      this.#pending = bands(rows, cols);
    }
    const run = async (/** @type {() => Promise<void> | undefined} */ breathe) => {
      this.#sum ??= kernel.allocate(rows, cols);
      await kernel.multiply(this.#sum, a.matrix.view(start, ready).T, b.matrix.view(start, ready), start > 0, breathe);
      return null;
    };
    return { part: null, flops: 2 * rows * cols * (ready - start), run };
  }

  /** @param {[Held, Held][]} pairs */
  #check(pairs) {
    const { layout, rows, cols } = this.program;
    for (const [{ matrix: a }, { matrix: b }] of pairs) {
      const fits =
        layout === "nt" ? a.rows === rows && b.rows === cols && a.cols === b.cols
        : layout === "nn" ? a.rows === rows && b.cols === cols && a.cols === b.rows
        : a.cols === rows && b.cols === cols && a.rows === b.rows;
      require(
        fits,
        `operands ${a.rows} x ${a.cols} and ${b.rows} x ${b.cols} do not make a block of ${rows} x ${cols} in layout ` +
          `${layout}; the server is at fault`,
      );
    }
  }
}

/**
 * How far to compute: up to what is ready if that is enough for a product, else no further.
 * @param {number} done
 * @param {number} ready
 * @param {number} whole
 */
function boundary(done, ready, whole) {
  return ready === whole || ready - done >= LEAST_SIDE ? ready : done;
}
