// Linear maps and norms, forward and backward: what every part is made of.

import { require } from "../errors.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./program.mjs").Weight} Weight */
/** @typedef {import("./program.mjs").Norm} Norm */

/**
 * All that the arithmetic sees of a task: some rows of one sequence, and the matrices they meet.
 * @typedef {object} Scope
 * @property {import("../kernel.mjs").Kernel} kernel
 * @property {import("../kernel.mjs").Room} room  for temporaries
 * @property {Map<number, Matrix>} values  operands by number
 * @property {Map<number, Matrix>} gradients  accumulators, by the number of the operand they belong to
 * @property {number} rows
 * @property {number} firstRow
 * @property {Matrix | null} mask
 * @property {Matrix | null} rotary  from these rows on
 * @property {Matrix | null} targets
 * @property {() => Promise<void> | undefined} breathe  lets messages in between two products
 */

/**
 * @param {Scope} scope
 * @param {number} number
 */
export function valueOf(scope, number) {
  const value = scope.values.get(number);
  require(value, `expected operand ${number} to be there, but it is not`);
  return value;
}

/**
 * W as a map from input to output: in x out.
 * @param {Scope} scope
 * @param {Weight} weight
 */
function mapOf(scope, weight) {
  const stored = valueOf(scope, weight.weight);
  return weight.isTransposed ? stored : stored.T;
}

/**
 * @param {Scope} scope
 * @param {Weight} weight
 */
export function outWidth(scope, weight) {
  return mapOf(scope, weight).cols;
}

/**
 * @param {Scope} scope
 * @param {Weight} weight
 */
export function inWidth(scope, weight) {
  return mapOf(scope, weight).rows;
}

/**
 * c = a b or c += a b
 * @param {Scope} scope
 * @param {Matrix} c
 * @param {Matrix} a
 * @param {Matrix} b
 * @param {boolean} [adds]
 */
function multiply(scope, c, a, b, adds = false) {
  return scope.kernel.multiply(c, a, b, adds, scope.breathe);
}

/**
 * y = x W^T + b + s (x A^T) B^T
 * @param {Scope} scope
 * @param {Weight} weight
 * @param {Matrix} x
 */
export async function apply(scope, weight, x) {
  const map = mapOf(scope, weight), y = scope.room.matrix(x.rows, map.cols);
  await multiply(scope, y, x, map);
  if (weight.bias !== null) scope.kernel.call.add_row(y.at, valueOf(scope, weight.bias).at, y.rows, y.cols);
  if (weight.adapter) {
    const projected = await project(scope, weight, x);
    await multiply(scope, y, projected, valueOf(scope, weight.adapter[1]).T, true);
    scope.room.free(projected);
  }
  return y;
}

/**
 * dx, added to `into` if that is given.
 * @param {Scope} scope
 * @param {Weight} weight
 * @param {Matrix} dy
 * @param {Matrix | null} [into]
 */
export async function inputGradient(scope, weight, dy, into = null) {
  const map = mapOf(scope, weight).T, dx = into ?? scope.room.matrix(dy.rows, map.cols);
  await multiply(scope, dx, dy, map, into !== null);
  if (weight.adapter) {
    const projected = await projectGradient(scope, weight, dy);
    await multiply(scope, dx, projected, valueOf(scope, weight.adapter[0]), true);
    scope.room.free(projected);
  }
  return dx;
}

/**
 * Add the gradients of a weight, its bias and its adapter to their accumulators, where there are any.
 * @param {Scope} scope
 * @param {Weight} weight
 * @param {Matrix} x
 * @param {Matrix} dy
 */
export async function addGradients(scope, weight, x, dy) {
  const { gradients, kernel } = scope;
  const total = gradients.get(weight.weight);
  if (total) await (weight.isTransposed ? multiply(scope, total, x.T, dy, true) : multiply(scope, total, dy.T, x, true));
  const bias = weight.bias === null ? undefined : gradients.get(weight.bias);
  if (bias) kernel.call.add_column_sums(bias.at, dy.at, dy.rows, dy.cols);
  if (!weight.adapter) return;
  const [a, b] = weight.adapter.map((number) => gradients.get(number));
  if (a) {
    const projected = await projectGradient(scope, weight, dy);
    await multiply(scope, a, projected.T, x, true);
    scope.room.free(projected);
  }
  if (b) {
    const projected = await project(scope, weight, x);
    await multiply(scope, b, dy.T, projected, true);
    scope.room.free(projected);
  }
}

/**
 * s (x A^T)
 * @param {Scope} scope
 * @param {Weight} weight
 * @param {Matrix} x
 */
async function project(scope, weight, x) {
  return scaledProduct(scope, x, valueOf(scope, /** @type {[number, number]} */ (weight.adapter)[0]).T, weight.scale);
}

/**
 * s (dy B)
 * @param {Scope} scope
 * @param {Weight} weight
 * @param {Matrix} dy
 */
async function projectGradient(scope, weight, dy) {
  return scaledProduct(scope, dy, valueOf(scope, /** @type {[number, number]} */ (weight.adapter)[1]), weight.scale);
}

/**
 * @param {Scope} scope
 * @param {Matrix} a
 * @param {Matrix} b
 * @param {number} factor
 */
async function scaledProduct(scope, a, b, factor) {
  const product = scope.room.matrix(a.rows, b.cols);
  await multiply(scope, product, a, b);
  scope.kernel.call.scale_by(product.at, factor, product.size);
  return product;
}

// ------------------------------------------------------------------------------------------- norms

/** @typedef {{y: Matrix, unscaled: Matrix, inverse: Matrix}} Normalized */

/**
 * @param {Scope} scope
 * @param {Norm} norm
 * @param {Matrix} x
 * @returns {Normalized}
 */
export function normalize(scope, norm, x) {
  const [y, unscaled] = [scope.room.matrix(x.rows, x.cols), scope.room.matrix(x.rows, x.cols)];
  const inverse = scope.room.matrix(x.rows, 1);
  const bias = norm.bias === null ? 0 : valueOf(scope, norm.bias).at;
  scope.kernel.call.normalize(
    y.at, unscaled.at, inverse.at, x.at, valueOf(scope, norm.weight).at, bias, x.rows, x.cols, Number(norm.isLayer), norm.eps,
  );
  return { y, unscaled, inverse };
}

/**
 * dx, in place of dy; the gradients of weight and bias go to their accumulators.
 * @param {Scope} scope
 * @param {Norm} norm
 * @param {Normalized} forward
 * @param {Matrix} dy
 */
export function normalizeBack(scope, norm, forward, dy) {
  const gain = scope.gradients.get(norm.weight), bias = norm.bias === null ? undefined : scope.gradients.get(norm.bias);
  scope.kernel.call.normalize_back(
    dy.at, forward.unscaled.at, forward.inverse.at, valueOf(scope, norm.weight).at, gain?.at ?? 0, bias?.at ?? 0,
    dy.rows, dy.cols, Number(norm.isLayer),
  );
  scope.room.free(forward.y, forward.unscaled, forward.inverse);
  return dy;
}
