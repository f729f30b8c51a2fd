// The MLP of a layer, gated or not, forward and backward.

import { addGradients, apply, inputGradient, normalize, normalizeBack } from "./linear.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./linear.mjs").Scope} Scope */
/** @typedef {import("./program.mjs").Mlp} Mlp */

/**
 * f(norm(x))
 * @param {Scope} scope
 * @param {Mlp} part
 * @param {Matrix} x
 */
export async function forward(scope, part, x) {
  const normed = normalize(scope, part.norm, x), { inner, up } = await products(scope, part, normed.y);
  scope.kernel.call.activate(inner.at, up?.at ?? 0, inner.size, part.activation);
  const y = await apply(scope, part.down, inner);
  scope.room.free(normed.y, normed.unscaled, normed.inverse, inner, ...(up ? [up] : []));
  return y;
}

/**
 * dx of f(norm(x)), from x alone.
 * @param {Scope} scope
 * @param {Mlp} part
 * @param {Matrix} x
 * @param {Matrix} dy
 */
export async function backward(scope, part, x, dy) {
  const { kernel, room } = scope, normed = normalize(scope, part.norm, x);
  const { inner: slope, up } = await products(scope, part, normed.y);
  const dInner = await inputGradient(scope, part.down, dy), inner = room.matrix(slope.rows, slope.cols);
  kernel.call.activate_back(slope.at, up?.at ?? 0, dInner.at, inner.at, inner.size, part.activation);
  await addGradients(scope, part.down, inner, dy);
  room.free(inner);
  /** @type {Matrix | null} */
  let dNormed = null;
  if (up) {
    await addGradients(scope, part.up, normed.y, dInner);
    dNormed = await inputGradient(scope, part.up, dInner);
    room.free(up);
  }
  room.free(dInner);
  await addGradients(scope, part.gate ?? part.up, normed.y, slope);
  dNormed = await inputGradient(scope, part.gate ?? part.up, slope, dNormed);
  room.free(slope);
  return normalizeBack(scope, part.norm, normed, dNormed);
}

/**
 * The product that the activation is applied to and, with a gate, the other one.
 * @param {Scope} scope
 * @param {Mlp} part
 * @param {Matrix} normed
 */
async function products(scope, part, normed) {
  const inner = await apply(scope, part.gate ?? part.up, normed);
  return { inner, up: part.gate ? await apply(scope, part.up, normed) : null };
}
