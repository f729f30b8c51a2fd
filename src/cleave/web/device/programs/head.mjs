// The head of a model: last norm, vocabulary and loss. Logits are made in bands of rows and never kept.

import { addGradients, apply, inputGradient, normalize, normalizeBack, outWidth } from "./linear.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./linear.mjs").Scope} Scope */
/** @typedef {import("./program.mjs").Head} Head */

const LOGITS = 1 << 22;

/**
 * rows x 2: logsumexp over these words, and the logit of the target.
 * @param {Scope} scope
 * @param {Head} head
 * @param {Matrix} x
 */
export async function forward(scope, head, x) {
  const normed = head.norm ? normalize(scope, head.norm, x) : null, result = scope.room.matrix(x.rows, 2);
  for (const [top, bottom] of bandsOf(scope, head)) {
    const logits = await apply(scope, head.weight, (normed?.y ?? x).view(top, bottom));
    const targets = targetsOf(scope).view(top, bottom);
    scope.kernel.call.head_losses(result.view(top, bottom).at, logits.at, targets.at, logits.rows, logits.cols, head.first);
    scope.room.free(logits);
  }
  if (normed) scope.room.free(normed.y, normed.unscaled, normed.inverse);
  return result;
}

/**
 * dx from rows x 2: the logsumexp over the whole vocabulary, and the derivative of the loss.
 * @param {Scope} scope
 * @param {Head} head
 * @param {Matrix} x
 * @param {Matrix} dy
 */
export async function backward(scope, head, x, dy) {
  const normed = head.norm ? normalize(scope, head.norm, x) : null, dx = scope.room.matrix(x.rows, x.cols);
  for (const [top, bottom] of bandsOf(scope, head)) {
    const entering = (normed?.y ?? x).view(top, bottom), logits = await apply(scope, head.weight, entering);
    scope.kernel.call.head_gradients(
      logits.at, targetsOf(scope).view(top, bottom).at, dy.view(top, bottom).at, logits.rows, logits.cols, head.first,
    );
    await addGradients(scope, head.weight, entering, logits);
    const band = await inputGradient(scope, head.weight, logits);
    scope.kernel.numbers(dx.view(top, bottom)).set(scope.kernel.numbers(band));
    scope.room.free(logits, band);
  }
  return head.norm && normed ? normalizeBack(scope, head.norm, normed, dx) : dx;
}

/**
 * @param {Scope} scope
 * @param {Head} head
 * @returns {Iterable<[number, number]>}
 */
function* bandsOf(scope, head) {
  const height = Math.max(1, Math.floor(LOGITS / outWidth(scope, head.weight)));
  for (let top = 0; top < scope.rows; top += height) yield [top, Math.min(top + height, scope.rows)];
}

/** @param {Scope} scope */
function targetsOf(scope) {
  return /** @type {Matrix} */ (scope.targets);
}
