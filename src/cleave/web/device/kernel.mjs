// What multiplies: the WebAssembly kernel, matrices in its memory, and the number formats of the wire.

import { LEAST_FLOPS } from "./gpu.mjs";
import { Heap } from "./heap.mjs";

/** @typedef {"fp32" | "bf16" | "fp16" | "q8"} Format */
/** @typedef {"silu" | "gelu" | "gelu_tanh" | "relu"} Activation */
/** @typedef {{[name: string]: (...numbers: number[]) => number}} Exports */

export const FORMATS = /** @type {const} */ (["fp32", "bf16", "fp16", "q8"]);
export const ACTIVATIONS = /** @type {const} */ (["silu", "gelu", "gelu_tanh", "relu"]);

const MOST_PAGES = 65536; // 4 GiB
const FIRST_PAGES = 64;
/** Operations of one product between two breaths, and the fewest rows of one: the kernel packs B anew for each. */
const BREATH_FLOPS = 4e8;
const LEAST_ROWS = 64;
/** Memory of the page itself, of buffers in transit, and of what the heap cannot use. */
const OVERHEAD_BYTES = 64 << 20;

/** A rectangle of numbers in linear memory: a matrix of its own, or a view of some rows and columns of one. */
export class Matrix {
  /**
   * @param {number} at  address of the first number
   * @param {number} rows
   * @param {number} cols
   * @param {number} [rowStep]  numbers from one row to the next
   * @param {number} [colStep]
   */
  constructor(at, rows, cols, rowStep = cols, colStep = 1) {
    this.at = at;
    this.rows = rows;
    this.cols = cols;
    this.rowStep = rowStep;
    this.colStep = colStep;
  }

  get size() {
    return this.rows * this.cols;
  }

  /** The transpose, as a view. */
  get T() {
    return new Matrix(this.at, this.cols, this.rows, this.colStep, this.rowStep);
  }

  /**
   * @param {number} top
   * @param {number} bottom
   * @param {number} [left]
   * @param {number} [right]
   */
  view(top, bottom, left = 0, right = this.cols) {
    const first = this.at + 4 * (top * this.rowStep + left * this.colStep);
    return new Matrix(first, bottom - top, right - left, this.rowStep, this.colStep);
  }
}

export class Kernel {
  /** @type {import("./gpu.mjs").Gpu | null} */
  gpu = null;
  #name;

  /**
   * @param {Exports} exports
   * @param {Heap} heap
   * @param {string} name
   */
  constructor(exports, heap, name) {
    this.call = exports;
    this.heap = heap;
    this.#name = name;
  }

  get name() {
    return this.gpu ? `webgpu-${this.gpu.name}` : this.#name;
  }

  /**
   * Load the fastest build that this machine can run.
   * @param {(file: string) => Promise<ArrayBuffer | Uint8Array>} read
   * @param {number} limitBytes  of memory that operands and results may take
   */
  static async load(read, limitBytes) {
    for (const [file, name] of [["kernel-relaxed.wasm", "wasm-relaxed"], ["kernel.wasm", "wasm"]]) {
      const bytes = /** @type {Uint8Array<ArrayBuffer>} */ (new Uint8Array(await read(file)));
      if (!WebAssembly.validate(bytes)) continue;
      const memory = new WebAssembly.Memory({ initial: FIRST_PAGES, maximum: MOST_PAGES });
      const { instance } = await WebAssembly.instantiate(bytes, { env: { memory, log: Math.log } });
      const base = /** @type {WebAssembly.Global} */ (instance.exports.__heap_base).value;
      const heap = new Heap(memory, base, Math.min(2 * limitBytes + OVERHEAD_BYTES, MOST_PAGES * 65536));
      return new Kernel(/** @type {Exports} */ (/** @type {unknown} */ (instance.exports)), heap, name);
    }
    throw new Error("this browser has no WebAssembly SIMD; use a newer one");
  }

  /**
   * @param {number} rows
   * @param {number} cols
   */
  allocate(rows, cols) {
    return new Matrix(this.heap.allocate(4 * rows * cols), rows, cols);
  }

  /**
   * @param {number} rows
   * @param {number} cols
   */
  zeros(rows, cols) {
    const matrix = this.allocate(rows, cols);
    this.call.fill(matrix.at, 0, matrix.size);
    return matrix;
  }

  /** @param {Matrix} matrix */
  free(matrix) {
    this.heap.free(matrix.at);
  }

  /**
   * The numbers of contiguous rows, until the next allocation.
   * @param {Matrix} matrix
   */
  numbers(matrix) {
    return new Float32Array(this.heap.memory.buffer, matrix.at, matrix.size);
  }

  /**
   * c = a b, or c += a b.
   * @param {Matrix} c
   * @param {Matrix} a
   * @param {Matrix} b
   * @param {boolean} [adds]
   */
  product(c, a, b, adds = false) {
    this.call.product(
      c.at, c.rowStep, a.at, a.rowStep, a.colStep, b.at, b.rowStep, b.colStep, c.rows, c.cols, a.cols, Number(adds),
    );
  }

  /**
   * The same, on the graphics processor if that is worth it, else in bands of rows, so that messages are answered in
   * between. Rows of c are contiguous.
   * @param {Matrix} c
   * @param {Matrix} a
   * @param {Matrix} b
   * @param {boolean} adds
   * @param {() => Promise<void> | undefined} breathe
   * @param {number} [leastFlops]  of a product for the graphics processor
   */
  async multiply(c, a, b, adds, breathe, leastFlops = LEAST_FLOPS) {
    if (this.gpu && !this.gpu.isLost && !adds && 2 * c.size * a.cols >= leastFlops) {
      try {
        const numbers = await this.gpu.product(this.heap.memory.buffer, a, b);
        this.numbers(c).set(numbers);
        return;
      } catch {
        this.gpu = null; // lost, or out of its memory: the kernel computes everything from now on
      }
    }
    const height = Math.max(LEAST_ROWS, Math.floor(BREATH_FLOPS / (2 * c.cols * a.cols)));
    for (let top = 0; top < c.rows; top += height) {
      const bottom = Math.min(top + height, c.rows);
      this.product(c.view(top, bottom), a.view(top, bottom), b, adds);
      await breathe();
    }
  }

  /**
   * Decode received rows into contiguous ones.
   * @param {Matrix} into
   * @param {Uint8Array} bytes
   * @param {Format} format
   */
  decode(into, bytes, format) {
    if (format === "fp32") {
      new Uint8Array(this.heap.memory.buffer, into.at, bytes.length).set(bytes);
      return;
    }
    const from = this.heap.allocate(bytes.length);
    new Uint8Array(this.heap.memory.buffer, from, bytes.length).set(bytes);
    if (format === "q8") this.call.decode_q8(into.at, from, into.rows, into.cols);
    else this.call[`decode_${format}`](into.at, from, into.size);
    this.heap.free(from);
  }

  /**
   * A copy of contiguous rows, in a format of the wire.
   * @param {Matrix} matrix
   * @param {Format} format
   */
  encode(matrix, format) {
    const size = encodedBytes(format, matrix.rows, matrix.cols);
    if (format === "fp32") return new Uint8Array(this.heap.memory.buffer, matrix.at, size).slice();
    const to = this.heap.allocate(size);
    if (format === "q8") this.call.encode_q8(to, matrix.at, matrix.rows, matrix.cols);
    else this.call[`encode_${format}`](to, matrix.at, matrix.size);
    const bytes = new Uint8Array(this.heap.memory.buffer, to, size).slice();
    this.heap.free(to);
    return bytes;
  }
}

/** Temporaries that are freed together. */
export class Room {
  /** @type {Set<Matrix>} */
  #held = new Set();

  /** @param {Kernel} kernel */
  constructor(kernel) {
    this.kernel = kernel;
  }

  /**
   * @param {number} rows
   * @param {number} cols
   */
  matrix(rows, cols) {
    const matrix = this.kernel.allocate(rows, cols);
    this.#held.add(matrix);
    return matrix;
  }

  /** @param {Matrix[]} matrices */
  free(...matrices) {
    for (const matrix of matrices) if (this.#held.delete(matrix)) this.kernel.free(matrix);
  }

  /**
   * Leave this matrix to the caller, who frees it.
   * @param {Matrix} matrix
   */
  release(matrix) {
    this.#held.delete(matrix);
    return matrix;
  }

  close() {
    this.free(...this.#held);
  }
}

/**
 * @param {Format} format
 * @param {number} rows
 * @param {number} cols
 */
export function encodedBytes(format, rows, cols) {
  switch (format) {
    case "fp32": return 4 * rows * cols;
    case "q8": return rows * (cols + 2 * Math.ceil(cols / 32));
    default: return 2 * rows * cols;
  }
}
