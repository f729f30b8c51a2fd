// Tasks over resident weights: rows of a sequence forward or backward, and gradients read at the end.

import { ProtocolError, require } from "../errors.mjs";
import { Room } from "../kernel.mjs";
import { bands } from "./bands.mjs";
import { keyWidth } from "./attention.mjs";
import { inWidth, outWidth, valueOf } from "./linear.mjs";
import { parameters, weightsOf } from "./program.mjs";
import * as shard from "./shard.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("../store.mjs").Store} Store */
/** @typedef {import("../store.mjs").State} State */
/** @typedef {import("./linear.mjs").Scope} Scope */
/** @typedef {import("./task.mjs").Chunk} Chunk */
/** @typedef {import("./task.mjs").Rectangle} Rectangle */
/** @typedef {import("./program.mjs").Forward | import("./program.mjs").Backward} Program */

const FAILED = -1;

/** Some rows of a sequence through a shard, forward or backward. */
export class ShardTask {
  /** @type {Rectangle[]} */
  #pending = [];
  /** @type {Matrix | null} */
  #result = null;
  #hasBegun = false;

  /**
   * @param {Program} program
   * @param {Store} store
   */
  constructor(program, store) {
    this.program = program;
    this.store = store;
    this.hasState = program.parts.some((part) => part.part === "attention");
  }

  get isFinished() {
    return this.#hasBegun && !this.#pending.length;
  }

  dispose() {
    if (this.#result) this.store.kernel.free(this.#result);
    this.#result = null;
  }

  /** @returns {Chunk | null} */
  nextChunk() {
    if (this.#hasBegun) {
      const part = this.#pending.shift();
      return part ? { part, flops: 0, run: async () => this.#band(part) } : null;
    }
    const scope = this.#bind();
    if (!scope || !this.#isInOrder(scope.rows)) return null;
    this.#hasBegun = true;
    const state = this.#state(scope), [rows, cols] = this.#shape(scope);
    this.#pending = bands(rows, cols);
    const part = /** @type {Rectangle} */ (this.#pending.shift());
    return { part, flops: this.#flops(scope), run: (breathe) => this.#run({ ...scope, breathe }, state, part) };
  }

  /**
   * @param {Scope} scope
   * @param {State | null} state
   * @param {Rectangle} part
   */
  async #run(scope, state, part) {
    const { program } = this, caches = state?.caches ?? [], x = valueOf(scope, program.x);
    try {
      /** @type {Matrix | null} */
      let result = null;
      if (program.program === "backward") {
        if (state) {
          state.backwardRow = FAILED; // until done: nothing may be added to half a gradient
          this.store.openGradients(state);
        }
        const dx = await shard.backward(scope, program, caches, x, valueOf(scope, program.dy));
        if (program.wantsDx) result = dx;
        if (state) state.backwardRow = program.firstRow;
      } else {
        if (program.isSilent) await shard.rebuild(scope, program, caches, x);
        else result = await shard.forward(scope, program, caches, x);
        if (state) state.forwardRows += scope.rows;
      }
      this.#result = result ? scope.room.release(result) : this.store.kernel.zeros(1, 1);
      return this.#band(part);
    } finally {
      scope.room.close();
    }
  }

  /** @param {Rectangle} part */
  #band(part) {
    return /** @type {Matrix} */ (this.#result).view(part.top, part.top + part.rows);
  }

  /**
   * Whether the sequence has reached these rows.
   * @param {number} rows
   */
  #isInOrder(rows) {
    if (!this.hasState) return true;
    const { program } = this, state = this.store.state(program.state);
    if (program.program === "forward") return (state?.forwardRows ?? 0) === program.firstRow;
    return Boolean(state) && state?.forwardRows === state?.sequence && state?.backwardRow === program.firstRow + rows;
  }

  /** @param {Scope} scope */
  #state(scope) {
    if (!this.hasState) return null;
    const { program } = this, attentions = program.parts.filter((part) => part.part === "attention");
    const widths = attentions.map((part) => keyWidth(scope, part));
    const state = this.store.state(program.state) ?? this.store.makeState(program.state, widths, program.sequence);
    require(
      state.sequence === program.sequence && state.widths.join() === widths.join(),
      `expected state ${program.state} of ${state.sequence} rows and key widths ${state.widths}, got a program for ` +
        `${program.sequence} and ${widths}`,
    );
    return state;
  }

  /** @param {Scope} scope */
  #shape(scope) {
    const { program } = this;
    const isSilent = program.program === "forward" ? program.isSilent : !program.wantsDx;
    if (isSilent) return [1, 1];
    return [scope.rows, program.program === "forward" && program.head ? 2 : valueOf(scope, program.x).cols];
  }

  /** @param {Scope} scope */
  #flops(scope) {
    const { program } = this;
    let numbers = 0;
    for (const part of program.head ? [...program.parts, program.head] : program.parts)
      for (const weight of weightsOf(part)) numbers += inWidth(scope, weight) * outWidth(scope, weight);
    return 2 * scope.rows * numbers * (program.program === "backward" ? 4 : 1);
  }

  /**
   * The operands of the program once all are complete, null before.
   * @returns {Scope | null}
   */
  #bind() {
    const { program, store } = this;
    const brought = [program.x, program.program === "backward" ? program.dy : null, program.mask, program.rotary, program.targets];
    /** @type {Map<number, Matrix>} */
    const values = new Map();
    for (const number of [...brought, ...parameters(program)]) {
      if (number === null) continue;
      const matrix = store.whole(number);
      if (!matrix) return null;
      require(!store.get(number)?.isAccumulator, `expected operand ${number} to have been sent, but it was made here`);
      values.set(number, matrix);
    }
    const x = /** @type {Matrix} */ (values.get(program.x)), at = (/** @type {number | null} */ number) =>
      number === null ? null : /** @type {Matrix} */ (values.get(number));
    checkShapes(program, values, x);
    /** @type {Map<number, Matrix>} */
    const gradients = new Map();
    if (program.program === "backward" && this.#isInOrder(x.rows))
      for (const [operand, number] of program.accumulators) {
        const { rows, cols } = /** @type {Matrix} */ (values.get(operand));
        gradients.set(operand, store.accumulator(number, rows, cols));
      }
    return {
      kernel: store.kernel, room: new Room(store.kernel), values, gradients, rows: x.rows, firstRow: program.firstRow,
      mask: at(program.mask), rotary: at(program.rotary)?.view(program.rotaryRow, program.rotaryRow + x.rows) ?? null,
      targets: at(program.targets), breathe: () => undefined,
    };
  }
}

/** Return accumulators, or operands that updates have changed, stacked and in bands of rows. */
export class CollectTask {
  /** @type {Rectangle[]} */
  #pending = [];
  #hasBegun = false;

  /**
   * @param {import("./program.mjs").Collect} program
   * @param {Store} store
   */
  constructor(program, store) {
    this.program = program;
    this.store = store;
  }

  get isFinished() {
    return this.#hasBegun && !this.#pending.length;
  }

  dispose() {}

  /** @returns {Chunk | null} */
  nextChunk() {
    const { program, store } = this, found = program.accumulators.map((number) => store.whole(number));
    if (found.includes(undefined)) return null;
    const totals = /** @type {Matrix[]} */ (found);
    const rows = totals.reduce((total, matrix) => total + matrix.rows, 0);
    const fits = totals.length > 1 ? rows === program.rows : program.firstRow + program.rows <= rows;
    require(
      fits && totals.every((matrix) => matrix.cols === program.cols),
      `expected ${totals.length} operands to have ${program.rows} x ${program.cols} from row ${program.firstRow}, ` +
        `got ${rows} rows`,
    );
    if (!this.#hasBegun) {
      this.#hasBegun = true;
      this.#pending = bands(program.rows, program.cols);
    }
    const part = this.#pending.shift();
    return part ? { part, flops: 0, ...this.#rows(totals, part) } : null;
  }

  /**
   * @param {Matrix[]} totals
   * @param {Rectangle} part
   */
  #rows(totals, part) {
    const { kernel } = this.store, room = new Room(kernel);
    const run = async () => {
      const top = this.program.firstRow + part.top;
      if (totals.length === 1) return totals[0].view(top, top + part.rows);
      const band = room.matrix(part.rows, part.cols);
      let first = 0;
      for (const total of totals) {
        const top = Math.max(first, part.top), bottom = Math.min(first + total.rows, part.top + part.rows);
        if (top < bottom)
          kernel.numbers(band.view(top - part.top, bottom - part.top)).set(kernel.numbers(total.view(top - first, bottom - first)));
        first += total.rows;
      }
      return band;
    };
    return { run, done: () => room.close() };
  }
}

/** Report that all listed operands have arrived. */
export class HoldTask {
  isFinished = false;

  /**
   * @param {import("./program.mjs").Hold} program
   * @param {Store} store
   */
  constructor(program, store) {
    this.program = program;
    this.store = store;
  }

  dispose() {}

  /** @returns {Chunk | null} */
  nextChunk() {
    if (this.isFinished || !this.program.operands.every((number) => this.store.whole(number))) return null;
    this.isFinished = true;
    return zero(this.store);
  }
}

/**
 * A chunk that only says that a task is done.
 * @param {Store} store
 * @param {() => void} [act]
 * @returns {Chunk}
 */
export function zero({ kernel }, act = () => {}) {
  const room = new Room(kernel);
  const run = async () => {
    act();
    const result = room.matrix(1, 1);
    kernel.call.fill(result.at, 0, 1);
    return result;
  };
  return { run, part: { top: 0, rows: 1, left: 0, cols: 1 }, flops: 0, done: () => room.close() };
}

// ------------------------------------------------------------------------------------------- shapes

/**
 * @param {Program} program
 * @param {Map<number, Matrix>} values
 * @param {Matrix} x
 */
function checkShapes(program, values, x) {
  const { rows, cols: hidden } = x;
  const expectShape = (/** @type {string} */ what, /** @type {number | null} */ number, /** @type {number} */ height,
    /** @type {number} */ width) => {
    const found = number === null ? null : values.get(number);
    require(
      !found || (found.rows === height && found.cols === width),
      `expected ${what} of ${height} x ${width}, got ${found?.rows} x ${found?.cols}; send another`,
    );
  };
  const widths = (/** @type {import("./program.mjs").Weight} */ weight) => {
    const { rows: first, cols: second } = /** @type {Matrix} */ (values.get(weight.weight));
    return weight.isTransposed ? { into: first, out: second } : { into: second, out: first };
  };
  require(program.firstRow + rows <= program.sequence, `expected rows within ${program.sequence}, got ${rows} more`);
  if (program.program === "backward") expectShape("dy", program.dy, rows, program.head ? 2 : hidden);
  expectShape("a mask", program.mask, 1, program.sequence);
  expectShape("targets", program.targets, rows, 1);
  for (const part of program.head ? [...program.parts, program.head] : program.parts) {
    if (part.norm) {
      expectShape("a norm", part.norm.weight, 1, hidden);
      expectShape("a norm", part.norm.bias, 1, hidden);
    }
    for (const weight of weightsOf(part)) {
      const { into, out } = widths(weight);
      expectShape("a bias", weight.bias, 1, out);
      if (!weight.adapter) continue;
      const [a, b] = weight.adapter;
      expectShape("an adapter's A", a, /** @type {Matrix} */ (values.get(a)).rows, into);
      expectShape("an adapter's B", b, out, /** @type {Matrix} */ (values.get(a)).rows);
    }
    let fits;
    if (!("part" in part)) fits = widths(part.weight).into === hidden;
    else if (part.part === "mlp") {
      const inner = widths(part.up).out, entering = part.gate ? [part.up, part.gate] : [part.up];
      fits = widths(part.down).into === inner && widths(part.down).out === hidden &&
        entering.every((weight) => widths(weight).into === hidden && widths(weight).out === inner);
    } else {
      const queries = widths(part.q).out, keys = widths(part.k).out;
      fits = widths(part.v).out === keys && widths(part.o).into === queries && widths(part.o).out === hidden &&
        keys % part.headDim === 0 && queries % keys === 0 &&
        [part.q, part.k, part.v].every((weight) => widths(weight).into === hidden);
      const table = program.rotary === null ? null : values.get(program.rotary);
      if (part.isRotary && !(table && table.rows >= program.rotaryRow + rows && table.cols === 2 * part.headDim))
        throw new ProtocolError(`expected a rotary table of ${2 * part.headDim} columns for these rows, got another`);
    }
    require(fits, `the weights of a part do not fit each other and ${hidden} columns of x; the server is at fault`);
  }
}
