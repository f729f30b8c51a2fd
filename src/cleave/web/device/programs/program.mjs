// The programs of the protocol, checked as far as possible without their operands.

import { ProtocolError, require } from "../errors.mjs";
import { fieldsOf, integers, pair } from "../fields.mjs";
import { ACTIVATIONS } from "../kernel.mjs";

/** @typedef {import("../fields.mjs").Fields} Fields */

const MOST_ROWS = 1 << 24; // positions are fp32, exact up to here

/**
 * @typedef {{weight: number, isTransposed: boolean, bias: number | null, adapter: [number, number] | null,
 *   scale: number}} Weight
 * @typedef {{isLayer: boolean, eps: number, weight: number, bias: number | null}} Norm
 * @typedef {{part: "attention", norm: Norm, q: Weight, k: Weight, v: Weight, o: Weight, headDim: number, scale: number,
 *   isRotary: boolean, window: number}} Attention  `window` is 0 where there is none
 * @typedef {{part: "mlp", norm: Norm, up: Weight, down: Weight, gate: Weight | null, activation: number}} Mlp
 * @typedef {{weight: Weight, norm: Norm | null, first: number}} Head
 * @typedef {Attention | Mlp} Part
 * @typedef {{program: "gemm", layout: "nt" | "nn" | "tn", terms: [number, number][], rows: number, cols: number}} Gemm
 * @typedef {{parts: Part[], head: Head | null, x: number, state: number, firstRow: number, sequence: number,
 *   isSlice: boolean, mask: number | null, rotary: number | null, rotaryRow: number, targets: number | null}} Unit
 * @typedef {Unit & {program: "forward", isSilent: boolean}} Forward
 * @typedef {Unit & {program: "backward", dy: number, accumulators: [number, number][], wantsDx: boolean}} Backward
 * @typedef {{program: "collect", accumulators: number[], rows: number, cols: number, firstRow: number}} Collect
 * @typedef {{program: "hold", operands: number[]}} Hold
 * @typedef {{program: "square_sum", accumulators: number[]}} SquareSum
 * @typedef {{weight: number, accumulator: number, states: number[]}} Leased
 * @typedef {{rule: "sgd", rate: number, momentum: number, dampening: number, weightDecay: number, isNesterov: boolean,
 *   isFirst: boolean, isAscent: boolean}} Sgd
 * @typedef {{rule: "adam", rate: number, beta1: number, beta2: number, eps: number, step: number, weightDecay: number,
 *   isDecoupled: boolean, isAscent: boolean}} Adam
 * @typedef {{program: "update", rule: Sgd | Adam, weights: Leased[], scale: number}} Update
 * @typedef {{program: "copy", copies: [number, number][]}} Copy
 * @typedef {Gemm | Forward | Backward | Collect | Hold | SquareSum | Update | Copy} Program
 */

/**
 * @param {Fields} fields
 * @returns {Program}
 */
export function parseProgram(fields) {
  const program = fields.text("program");
  switch (program) {
    case "gemm": return parseGemm(fields);
    case "forward": return { program, ...parseUnit(fields, []), isSilent: fields.bool("is_silent", false) };
    case "backward": {
      const accumulators = fields.pairs("accumulators", []);
      return {
        program, ...parseUnit(fields, accumulators), dy: fields.integer("dy"), accumulators,
        wantsDx: fields.bool("wants_dx", true),
      };
    }
    case "collect": {
      const [rows, cols] = [fields.integer("rows"), fields.integer("cols")];
      require(rows >= 1 && cols >= 1, `expected an operand of at least 1 x 1, got ${rows} x ${cols}`);
      const accumulators = [fields.integer("accumulator"), ...fields.integers("below", [])];
      const firstRow = fields.integer("first_row", 0);
      require(
        firstRow === 0 || (firstRow > 0 && accumulators.length === 1),
        `expected rows from 0 of one operand alone, got ${firstRow}`,
      );
      return { program, accumulators, rows, cols, firstRow };
    }
    case "hold": return { program, operands: fields.integers("operands") };
    case "square_sum": {
      const accumulators = fields.integers("accumulators");
      requireDistinct(accumulators);
      return { program, accumulators };
    }
    case "update": return parseUpdate(fields);
    case "copy": {
      const copies = fields.pairs("copies");
      requireDistinct(copies.flat());
      return { program, copies };
    }
    default: throw new ProtocolError(`expected one of eight programs, got ${JSON.stringify(program).slice(0, 60)}`);
  }
}

/**
 * @param {Fields} fields
 * @returns {Gemm}
 */
function parseGemm(fields) {
  const layout = fields.choice("layout", /** @type {const} */ (["nt", "nn", "tn"]));
  const [terms, rows, cols] = [fields.pairs("terms"), fields.integer("rows"), fields.integer("cols")];
  require(
    terms.length > 0 && rows > 0 && cols > 0 && (layout !== "tn" || terms.length === 1),
    `expected a block of at least one term and 1 x 1, got ${terms.length} terms of ${rows} x ${cols}`,
  );
  return { program: "gemm", layout, terms, rows, cols };
}

// ------------------------------------------------------------------------------------------- forward, backward

/**
 * @param {Fields} fields
 * @param {[number, number][]} accumulators
 * @returns {Unit}
 */
function parseUnit(fields, accumulators) {
  /** @type {Unit} */
  const unit = {
    parts: fields.list("parts").map((part) => parsePart(fieldsOf(part, "a part"))),
    head: fields.has("head") ? parseHead(fields.fields("head")) : null,
    x: fields.integer("x"),
    state: fields.integer("state"),
    firstRow: fields.integer("first_row"),
    sequence: fields.integer("sequence"),
    isSlice: fields.bool("is_slice", false),
    mask: fields.optional("mask"),
    rotary: fields.optional("rotary"),
    rotaryRow: fields.integer("rotary_row", 0),
    targets: fields.optional("targets"),
  };
  const parts = unit.parts.length + (unit.head ? 1 : 0);
  require(parts > 0 && (!unit.isSlice || parts === 1), `expected parts, of a slice exactly one, got ${parts}`);
  require(
    unit.firstRow >= 0 && unit.firstRow < unit.sequence && unit.sequence <= MOST_ROWS && unit.rotaryRow >= 0,
    `expected rows within a sequence of at most ${MOST_ROWS}, got row ${unit.firstRow} of ${unit.sequence}`,
  );
  require((unit.head === null) === (unit.targets === null), "expected targets with a head and only then");
  require(
    unit.rotary !== null || !unit.parts.some((part) => part.part === "attention" && part.isRotary),
    "expected a rotary table for an attention that is rotary, got none",
  );
  const named = new Set(parameters(unit));
  require(
    accumulators.every(([operand]) => named.has(operand)) &&
      new Set(accumulators.flat()).size === 2 * accumulators.length,
    "expected an accumulator of its own for some weights of the program, got others",
  );
  return unit;
}

/**
 * @param {Fields} fields
 * @returns {Part}
 */
function parsePart(fields) {
  const part = fields.choice("part", /** @type {const} */ (["attention", "mlp"]));
  const norm = parseNorm(fields.fields("norm"));
  if (part === "mlp") {
    return {
      part, norm,
      up: parseWeight(fields.fields("up")),
      down: parseWeight(fields.fields("down")),
      gate: fields.has("gate") ? parseWeight(fields.fields("gate")) : null,
      activation: ACTIVATIONS.indexOf(fields.choice("activation", ACTIVATIONS)),
    };
  }
  const [headDim, isRotary] = [fields.integer("head_dim"), fields.bool("is_rotary", false)];
  const window = fields.optional("window");
  require(
    headDim > 0 && !(isRotary && headDim % 2) && (window === null || window > 0),
    `expected a head_dim and a window from 1 up, even if rotary, got ${headDim} and ${window}`,
  );
  return {
    part, norm, headDim, isRotary,
    window: Math.min(window ?? 0, MOST_ROWS), // beyond all rows is none, and the kernel counts in 32 bits
    q: parseWeight(fields.fields("q")),
    k: parseWeight(fields.fields("k")),
    v: parseWeight(fields.fields("v")),
    o: parseWeight(fields.fields("o")),
    scale: fields.number("scale"),
  };
}

/**
 * @param {Fields} fields
 * @returns {Head}
 */
function parseHead(fields) {
  return {
    weight: parseWeight(fields.fields("weight")),
    norm: fields.has("norm") ? parseNorm(fields.fields("norm")) : null,
    first: fields.integer("first", 0),
  };
}

/**
 * @param {Fields} fields
 * @returns {Weight}
 */
function parseWeight(fields) {
  return {
    weight: fields.integer("weight"),
    isTransposed: fields.bool("is_transposed", false),
    bias: fields.optional("bias"),
    adapter: fields.has("adapter") ? pair(fields.list("adapter"), "an adapter") : null,
    scale: fields.number("scale", { fallback: 0 }),
  };
}

/**
 * @param {Fields} fields
 * @returns {Norm}
 */
function parseNorm(fields) {
  return {
    isLayer: fields.choice("kind", /** @type {const} */ (["rms", "layer"])) === "layer",
    eps: fields.number("eps", { least: 0 }),
    weight: fields.integer("weight"),
    bias: fields.optional("bias"),
  };
}

/**
 * The linear maps of a part or head, in the order a row passes through them.
 * @param {Part | Head} part
 * @returns {Weight[]}
 */
export function weightsOf(part) {
  if (!("part" in part)) return [part.weight];
  if (part.part === "attention") return [part.q, part.k, part.v, part.o];
  return part.gate ? [part.gate, part.up, part.down] : [part.up, part.down];
}

/**
 * Numbers of all weights of a program.
 * @param {Unit} unit
 */
export function parameters(unit) {
  /** @type {number[]} */
  const numbers = [];
  for (const part of unit.head ? [...unit.parts, unit.head] : unit.parts) {
    if (part.norm) numbers.push(part.norm.weight, ...(part.norm.bias === null ? [] : [part.norm.bias]));
    for (const { weight, bias, adapter } of weightsOf(part))
      numbers.push(weight, ...(bias === null ? [] : [bias]), ...(adapter ?? []));
  }
  return numbers;
}

// ------------------------------------------------------------------------------------------- leases

/**
 * @param {Fields} fields
 * @returns {Update}
 */
function parseUpdate(fields) {
  const rule = parseRule(fields.fields("rule"));
  const states = rule.rule === "adam" ? 2 : rule.momentum ? 1 : 0;
  const weights = fields.list("weights").map((entry) => {
    require(Array.isArray(entry) && entry.length >= 2, "expected weight, accumulator and states, got something else");
    const [weight, accumulator] = integers(entry.slice(0, 2), "a leased weight");
    const found = integers(entry[2] ?? [], "states of a leased weight");
    require(found.length === states, `expected ${states} states for this rule, got ${found.length}`);
    return { weight, accumulator, states: found };
  });
  requireDistinct(weights.flatMap((one) => [one.weight, one.accumulator, ...one.states]));
  return { program: "update", rule, weights, scale: fields.number("scale", { fallback: 1 }) };
}

/**
 * @param {Fields} fields
 * @returns {Sgd | Adam}
 */
function parseRule(fields) {
  const rule = fields.choice("rule", /** @type {const} */ (["sgd", "adam"]));
  const shared = {
    rate: fields.number("rate"),
    weightDecay: fields.number("weight_decay", { fallback: 0 }),
    isAscent: fields.bool("is_ascent", false),
  };
  if (rule === "sgd") {
    return {
      rule, ...shared,
      momentum: fields.number("momentum", { fallback: 0 }),
      dampening: fields.number("dampening", { fallback: 0 }),
      isNesterov: fields.bool("is_nesterov", false),
      isFirst: fields.bool("is_first", false),
    };
  }
  const [beta1, beta2] = [fields.number("beta1", { least: 0 }), fields.number("beta2", { least: 0 })];
  const step = fields.integer("step");
  require(beta1 < 1 && beta2 < 1 && step >= 1, `expected betas below 1 and a step from 1, got ${beta1}, ${beta2}, ${step}`);
  return {
    rule, ...shared, beta1, beta2, step,
    eps: fields.number("eps", { least: 0 }),
    isDecoupled: fields.bool("is_decoupled", false),
  };
}

/** @param {number[]} numbers */
function requireDistinct(numbers) {
  require(
    numbers.length > 0 && new Set(numbers).size === numbers.length,
    `expected at least one operand and none twice, got ${numbers.length}`,
  );
}
