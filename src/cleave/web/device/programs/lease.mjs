// Tasks on leased weights: sum the squares of gradients, update weights and states in place, copy them.

import { require } from "../errors.mjs";
import { Room } from "../kernel.mjs";
import { zero } from "./resident.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./task.mjs").Chunk} Chunk */

export class LeaseTask {
  isFinished = false;

  /**
   * @param {import("./program.mjs").SquareSum | import("./program.mjs").Update | import("./program.mjs").Copy} program
   * @param {import("../store.mjs").Store} store
   */
  constructor(program, store) {
    this.program = program;
    this.store = store;
  }

  dispose() {}

  /** @returns {Chunk | null} */
  nextChunk() {
    if (this.isFinished) return null;
    const { program } = this;
    const chunk = program.program === "square_sum" ? this.#squareSum(program)
      : program.program === "update" ? this.#update(program)
      : this.#copy(program);
    this.isFinished = chunk !== null;
    return chunk;
  }

  /**
   * @param {import("./program.mjs").SquareSum} program
   * @returns {Chunk | null}
   */
  #squareSum({ accumulators }) {
    const totals = accumulators.map((number) => this.#accumulator(number));
    if (totals.includes(undefined)) return null;
    const { kernel } = this.store, room = new Room(kernel);
    const run = async () => {
      const result = room.matrix(1, totals.length);
      const sums = totals.map((total) => total ? kernel.call.square_sum(total.at, total.size) : 0);
      kernel.numbers(result).set(sums);
      return result;
    };
    const flops = totals.reduce((total, matrix) => total + 2 * (matrix?.size ?? 0), 0);
    return { run, part: { top: 0, rows: 1, left: 0, cols: totals.length }, flops, done: () => room.close() };
  }

  /**
   * @param {import("./program.mjs").Update} program
   * @returns {Chunk | null}
   */
  #update({ rule, weights, scale }) {
    const { call } = this.store.kernel, factor = rule.isAscent ? -scale : scale;
    /** @type {(() => void)[]} */
    const steps = [];
    let flops = 0;
    for (const { weight: number, accumulator, states } of weights) {
      const weight = this.#operand(number), gradient = this.#accumulator(accumulator);
      const kept = states.map((state) => this.#operand(state));
      if (!weight || !gradient || kept.includes(undefined)) return null;
      const all = [gradient, .../** @type {Matrix[]} */ (kept)];
      require(
        all.every((matrix) => matrix.rows === weight.rows && matrix.cols === weight.cols),
        `expected gradient and states of operand ${number} to be ${weight.rows} x ${weight.cols}, but one is not`,
      );
      const [first, second] = kept;
      flops += 12 * weight.size;
      steps.push(rule.rule === "sgd"
        ? () => call.sgd(
            weight.at, gradient.at, first?.at ?? 0, weight.size, factor, rule.rate, rule.momentum, rule.dampening,
            rule.weightDecay, Number(rule.isNesterov), Number(rule.isFirst),
          )
        : () => call.adam(
            weight.at, gradient.at, first?.at ?? 0, second?.at ?? 0, weight.size, factor, rule.beta1, rule.beta2, rule.eps,
            rule.isDecoupled ? 0 : rule.weightDecay, rule.isDecoupled ? 1 - rule.rate * rule.weightDecay : 1,
            rule.rate / (1 - rule.beta1 ** rule.step), Math.sqrt(1 - rule.beta2 ** rule.step),
          ));
    }
    return { ...zero(this.store, () => steps.forEach((step) => step())), flops };
  }

  /**
   * @param {import("./program.mjs").Copy} program
   * @returns {Chunk | null}
   */
  #copy({ copies }) {
    const { store } = this, found = copies.map(([operand]) => this.#operand(operand));
    if (found.includes(undefined)) return null;
    return zero(store, () => copies.forEach(([, copy], i) => {
      const source = /** @type {Matrix} */ (found[i]);
      const { matrix } = store.makeAccumulator(copy, source.rows, source.cols);
      store.kernel.numbers(matrix).set(store.kernel.numbers(source));
    }));
  }

  /** @param {number} number */
  #accumulator(number) {
    const held = this.store.get(number);
    require(!held || held.isAccumulator, `expected ${number} to be an accumulator, but it was sent`);
    return this.store.whole(number);
  }

  /** @param {number} number */
  #operand(number) {
    const held = this.store.get(number);
    require(!held || !held.isAccumulator, `expected ${number} to have been sent, but it was made here`);
    return this.store.whole(number);
  }
}
