// A shard of the model over some rows of a sequence: forward, and backward from the input alone.
//
// Forward keeps only keys and values. Backward first reruns forward to recover the input of each part, then goes back
// through the parts; each makes its own inner activations again.

import * as attention from "./attention.mjs";
import * as head from "./head.mjs";
import * as mlp from "./mlp.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./linear.mjs").Scope} Scope */
/** @typedef {import("./program.mjs").Unit} Unit */
/** @typedef {import("./program.mjs").Part} Part */
/** @typedef {import("../store.mjs").Cache} Cache */

/**
 * @param {Scope} scope
 * @param {Unit} shard
 * @param {Cache[]} caches  one for each attention
 * @param {Matrix} x
 */
export async function forward(scope, shard, caches, x) {
  const remaining = caches.values();
  let y = x;
  for (const part of shard.parts) y = await applyPart(scope, shard, part, remaining, y, y !== x, true);
  return shard.head ? head.forward(scope, shard.head, y) : y;
}

/**
 * Fill the caches, and compute nothing that they do not need.
 * @param {Scope} scope
 * @param {Unit} shard
 * @param {Cache[]} caches
 * @param {Matrix} x
 */
export async function rebuild(scope, shard, caches, x) {
  const remaining = caches.values();
  const last = shard.parts.findLastIndex((part) => part.part === "attention");
  let y = x;
  for (const part of shard.parts.slice(0, Math.max(last, 0)))
    y = await applyPart(scope, shard, part, remaining, y, y !== x, true);
  const part = shard.parts[last];
  if (part?.part === "attention") await attention.fillCache(scope, part, next(remaining), y);
}

/**
 * dx; weight gradients go to their accumulators.
 * @param {Scope} scope
 * @param {Unit} shard
 * @param {Cache[]} caches
 * @param {Matrix} x
 * @param {Matrix} dy
 */
export async function backward(scope, shard, caches, x, dy) {
  const inputs = [x], remaining = caches.values();
  for (const part of shard.head ? shard.parts : shard.parts.slice(0, -1))
    inputs.push(await applyPart(scope, shard, part, remaining, inputs[inputs.length - 1], false, false));
  let gradient = dy;
  if (shard.head) gradient = await head.backward(scope, shard.head, /** @type {Matrix} */ (inputs.pop()), gradient);
  const backwards = caches.toReversed().values();
  for (const part of shard.parts.toReversed()) {
    const entered = /** @type {Matrix} */ (inputs.pop());
    const dx = part.part === "attention"
      ? await attention.backward(scope, part, next(backwards), entered, gradient)
      : await mlp.backward(scope, part, entered, gradient);
    if (!shard.isSlice) scope.kernel.call.add_to(dx.at, gradient.at, dx.size);
    scope.room.free(...[gradient, entered].filter((matrix) => matrix !== dy && matrix !== x));
    gradient = dx;
  }
  return gradient;
}

/**
 * @param {Scope} scope
 * @param {Unit} shard
 * @param {Part} part
 * @param {Iterator<Cache>} caches
 * @param {Matrix} x
 * @param {boolean} isTemporary  whether x is wanted no more
 * @param {boolean} fills
 */
async function applyPart(scope, shard, part, caches, x, isTemporary, fills) {
  const y = part.part === "attention"
    ? await attention.forward(scope, part, next(caches), x, fills)
    : await mlp.forward(scope, part, x);
  if (!shard.isSlice) scope.kernel.call.add_to(y.at, x.at, y.size);
  if (isTemporary) scope.room.free(x);
  return y;
}

/**
 * @param {Iterator<Cache>} caches
 * @returns {Cache}
 */
function next(caches) {
  return /** @type {Cache} */ (caches.next().value);
}
