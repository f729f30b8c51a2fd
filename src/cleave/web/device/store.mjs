// What a device holds, within the memory it offered: operands it was sent, accumulators and states it made.
//
// The server decides what is held and dropped. The store only refuses what would exceed the limit or comes out of order.

import { require } from "./errors.mjs";
import { encodedBytes } from "./kernel.mjs";

/** @typedef {import("./kernel.mjs").Kernel} Kernel */
/** @typedef {import("./kernel.mjs").Matrix} Matrix */

const MOST_HELD = 1 << 17;

/**
 * A matrix on the device, filled from its first row down.
 * @typedef {{matrix: Matrix, readyRows: number, isAccumulator: boolean}} Held
 */
/** @typedef {{keys: Matrix, values: Matrix, keyGradients: Matrix | null, valueGradients: Matrix | null}} Cache */
/**
 * Keys and values of one sequence, and its progress; `backwardRow` is negative while a task runs or after one failed.
 * @typedef {{widths: number[], sequence: number, caches: Cache[], forwardRows: number, backwardRow: number,
 *   bytes: number}} State
 */

export class Store {
  /** @type {Map<number, Held>} */
  #operands = new Map();
  /** @type {Map<number, State>} */
  #states = new Map();
  usedBytes = 0;

  /**
   * @param {Kernel} kernel
   * @param {number} memoryBytes
   */
  constructor(kernel, memoryBytes) {
    this.kernel = kernel;
    this.memoryBytes = memoryBytes;
  }

  /**
   * Decode a strip of rows into its operand; the first strip makes room for all of it.
   * @param {Extract<import("./messages.mjs").FromServer, {type: "store"}>} message
   * @param {Uint8Array} payload
   */
  write(message, payload) {
    const { operand, rows, cols, format, firstRow, stripRows } = message;
    require(!this.#states.has(operand), `expected a free number for an operand, got ${operand}, which is a state`);
    let held = this.#operands.get(operand);
    if (!held) {
      require(firstRow === 0, `expected the first strip of operand ${operand} to begin at row 0, got ${firstRow}`);
      held = this.#make(operand, rows, cols, 0, false);
    }
    const { matrix, readyRows, isAccumulator } = held;
    require(!isAccumulator, `expected a free number for an operand, got ${operand}, which is an accumulator`);
    const end = firstRow + stripRows;
    require(
      matrix.rows === rows && matrix.cols === cols && firstRow === readyRows && stripRows >= 1 && end <= rows,
      `expected rows from ${readyRows} on of operand ${operand} (${matrix.rows} x ${matrix.cols}), got ${firstRow}-${end} ` +
        `of ${rows} x ${cols}`,
    );
    const size = encodedBytes(format, stripRows, cols);
    require(payload.length === size, `expected ${size} bytes of ${stripRows} x ${cols} in ${format}, got ${payload.length}`);
    this.kernel.decode(matrix.view(firstRow, end), payload, format);
    held.readyRows = end;
  }

  /** @param {number[]} numbers */
  drop(numbers) {
    for (const number of numbers) {
      const held = this.#operands.get(number);
      if (held) {
        this.#operands.delete(number);
        this.usedBytes -= 4 * held.matrix.size;
        this.kernel.free(held.matrix);
      }
      const state = this.#states.get(number);
      if (state) {
        this.#states.delete(number);
        this.usedBytes -= state.bytes;
        for (const cache of state.caches)
          for (const matrix of [cache.keys, cache.values, cache.keyGradients, cache.valueGradients])
            if (matrix) this.kernel.free(matrix);
      }
    }
  }

  clear() {
    this.drop([...this.#operands.keys(), ...this.#states.keys()]);
  }

  /** @param {number} number */
  get(number) {
    return this.#operands.get(number);
  }

  /**
   * The matrix of an operand or accumulator once it is complete.
   * @param {number} number
   */
  whole(number) {
    const held = this.#operands.get(number);
    return held && held.readyRows === held.matrix.rows ? held.matrix : undefined;
  }

  /** @param {number} number */
  state(number) {
    return this.#states.get(number);
  }

  /**
   * @param {number} number
   * @param {number[]} widths  of the keys of each attention
   * @param {number} sequence
   */
  makeState(number, widths, sequence) {
    const bytes = widths.reduce((total, width) => total + 16 * sequence * width, 0);
    this.#claim(number, bytes);
    /** @type {Matrix[]} */
    const made = [];
    try {
      for (const width of widths.flatMap((one) => [one, one])) made.push(this.kernel.zeros(sequence, width));
    } catch (fault) {
      made.forEach((matrix) => this.kernel.free(matrix));
      throw fault;
    }
    const caches = widths.map((_, i) => (
      { keys: made[2 * i], values: made[2 * i + 1], keyGradients: null, valueGradients: null }
    ));
    /** @type {State} */
    const state = { widths, sequence, caches, forwardRows: 0, backwardRow: sequence, bytes };
    this.#states.set(number, state);
    this.usedBytes += bytes;
    return state;
  }

  /**
   * Make room for the gradients of keys and values, unless an earlier task did.
   * @param {State} state
   */
  openGradients(state) {
    state.caches.forEach((cache, i) => {
      cache.keyGradients ??= this.kernel.zeros(state.sequence, state.widths[i]);
      cache.valueGradients ??= this.kernel.zeros(state.sequence, state.widths[i]);
    });
  }

  /**
   * The accumulator of that number, zeros if it is new.
   * @param {number} number
   * @param {number} rows
   * @param {number} cols
   */
  accumulator(number, rows, cols) {
    const held = this.#operands.get(number) ?? this.makeAccumulator(number, rows, cols);
    require(
      held.isAccumulator && held.matrix.rows === rows && held.matrix.cols === cols,
      `expected operand ${number} to be an accumulator of ${rows} x ${cols}, but it is another`,
    );
    return held.matrix;
  }

  /**
   * @param {number} number
   * @param {number} rows
   * @param {number} cols
   */
  makeAccumulator(number, rows, cols) {
    const held = this.#make(number, rows, cols, rows, true);
    this.kernel.call.fill(held.matrix.at, 0, held.matrix.size);
    return held;
  }

  /**
   * @param {number} number
   * @param {number} rows
   * @param {number} cols
   * @param {number} readyRows
   * @param {boolean} isAccumulator
   */
  #make(number, rows, cols, readyRows, isAccumulator) {
    require(rows >= 1 && cols >= 1, `expected an operand of at least 1 x 1, got ${rows} x ${cols}`);
    this.#claim(number, 4 * rows * cols);
    /** @type {Held} */
    const held = { matrix: this.kernel.allocate(rows, cols), readyRows, isAccumulator };
    this.#operands.set(number, held);
    this.usedBytes += 4 * rows * cols;
    return held;
  }

  /**
   * @param {number} number
   * @param {number} bytes
   */
  #claim(number, bytes) {
    const held = this.#operands.size + this.#states.size;
    require(!this.#operands.has(number) && !this.#states.has(number), `expected a free number, got ${number}`);
    require(held < MOST_HELD, `expected at most ${MOST_HELD} operands at once, got one more`);
    require(
      this.usedBytes + bytes <= this.memoryBytes,
      `this needs ${bytes} more bytes where ${this.memoryBytes - this.usedBytes} of ${this.memoryBytes} are free`,
    );
  }
}
