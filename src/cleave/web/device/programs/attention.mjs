// Causal attention over some rows of a sequence, forward and backward, with the keys and values of the rows before.
//
// Forward, rows come in order and leave their keys and values in the cache. Backward, they come in reverse, so the
// gradients of keys and values are complete by the time their own rows are reached. Scores are made tile by tile.

import { addGradients, apply, inputGradient, normalize, normalizeBack, outWidth } from "./linear.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */
/** @typedef {import("./linear.mjs").Scope} Scope */
/** @typedef {import("./program.mjs").Attention} Attention */
/** @typedef {import("../store.mjs").Cache} Cache */

const TILE_ROWS = 128;

/**
 * Compute only the keys and values of `x`.
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Cache} cache
 * @param {Matrix} x
 */
export async function fillCache(scope, part, cache, x) {
  const normed = normalize(scope, part.norm, x);
  await fill(scope, part, cache, normed.y);
  scope.room.free(normed.y, normed.unscaled, normed.inverse);
}

/**
 * f(norm(x)). Without `fills`, the cache already has the keys and values of these rows.
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Cache} cache
 * @param {Matrix} x
 * @param {boolean} fills
 */
export async function forward(scope, part, cache, x, fills) {
  const { kernel, room } = scope, normed = normalize(scope, part.norm, x);
  if (fills) await fill(scope, part, cache, normed.y);
  const queries = await queriesOf(scope, part, normed.y);
  room.free(normed.y, normed.unscaled, normed.inverse);
  const context = room.matrix(x.rows, queries.cols), scores = scoresFor(scope);
  for (const tile of tilesOf(scope, part, queries, cache)) {
    const p = probabilities(scope, part, tile, scores);
    kernel.product(tile.of(context), p, tile.keysOf(cache.values));
    await scope.breathe();
  }
  const y = await apply(scope, part.o, context);
  room.free(queries, context, scores);
  return y;
}

/**
 * dx of f(norm(x)), from x alone.
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Cache} cache
 * @param {Matrix} x
 * @param {Matrix} dy
 */
export async function backward(scope, part, cache, x, dy) {
  const { kernel, room } = scope, normed = normalize(scope, part.norm, x);
  const keyGradients = /** @type {Matrix} */ (cache.keyGradients);
  const valueGradients = /** @type {Matrix} */ (cache.valueGradients);
  const queries = await queriesOf(scope, part, normed.y);
  const [context, dQueries] = [room.matrix(x.rows, queries.cols), room.matrix(x.rows, queries.cols)];
  const dContext = await inputGradient(scope, part.o, dy);
  const [scores, dScores, shares] = [scoresFor(scope), scoresFor(scope), room.matrix(TILE_ROWS, 1)];
  for (const tile of tilesOf(scope, part, queries, cache)) {
    const p = probabilities(scope, part, tile, scores), q = tile.of(queries);
    const [own, dOwn] = [tile.of(context), tile.of(dContext)];
    const [keys, values] = [tile.keysOf(cache.keys), tile.keysOf(cache.values)];
    kernel.product(own, p, values);
    kernel.product(tile.keysOf(valueGradients), p.T, dOwn, true);
    const d = dScores.view(0, 1, 0, p.size);
    const dp = Object.assign(d, { rows: p.rows, cols: p.cols, rowStep: p.cols });
    kernel.product(dp, dOwn, values.T);
    kernel.call.row_products(shares.at, own.at, dOwn.at, own.rows, own.cols, own.rowStep);
    kernel.call.softmax_back(dp.at, p.at, shares.at, p.rows, p.cols);
    kernel.product(tile.of(dQueries), dp, keys);
    kernel.product(tile.keysOf(keyGradients), dp.T, q, true);
    await scope.breathe();
  }
  room.free(scores, dScores, shares, queries, dContext);
  await addGradients(scope, part.o, context, dy);
  room.free(context);
  kernel.call.scale_by(dQueries.at, part.scale, dQueries.size);
  const end = scope.firstRow + scope.rows;
  const [dKeys, dValues] = [keyGradients.view(scope.firstRow, end), valueGradients.view(scope.firstRow, end)];
  /** @type {Matrix | null} */
  let dNormed = null;
  for (const [weight, gradient, isRotated] of /** @type {const} */ ([
    [part.q, dQueries, part.isRotary], [part.k, dKeys, part.isRotary], [part.v, dValues, false],
  ])) {
    if (isRotated) rotate(scope, part, gradient, true);
    await addGradients(scope, weight, normed.y, gradient);
    dNormed = await inputGradient(scope, weight, gradient, dNormed);
  }
  room.free(dQueries);
  return normalizeBack(scope, part.norm, normed, /** @type {Matrix} */ (dNormed));
}

// ------------------------------------------------------------------------------------------- tiles

/**
 * Some rows of one query head, with the keys that they can see.
 * @typedef {{top: number, bottom: number, firstKey: number, lastKey: number, of: (rows: Matrix) => Matrix,
 *   keysOf: (cached: Matrix) => Matrix, queries: Matrix, keys: Matrix}} Tile
 */

/**
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Matrix} queries
 * @param {Cache} cache
 * @returns {Iterable<Tile>}
 */
function* tilesOf(scope, part, queries, cache) {
  const { headDim } = part, heads = queries.cols / headDim, shared = heads / (cache.keys.cols / headDim);
  for (let top = 0; top < scope.rows; top += TILE_ROWS) {
    const bottom = Math.min(top + TILE_ROWS, scope.rows), lastKey = scope.firstRow + bottom;
    const firstKey = part.window ? Math.max(0, scope.firstRow + top + 1 - part.window) : 0;
    for (let head = 0; head < heads; head++) {
      const left = head * headDim, keyLeft = Math.floor(head / shared) * headDim;
      const of = (/** @type {Matrix} */ rows) => rows.view(top, bottom, left, left + headDim);
      const keysOf = (/** @type {Matrix} */ cached) => cached.view(firstKey, lastKey, keyLeft, keyLeft + headDim);
      yield { top, bottom, firstKey, lastKey, of, keysOf, queries: of(queries), keys: keysOf(cache.keys) };
    }
  }
}

/**
 * Room for the scores of the largest tile.
 * @param {Scope} scope
 */
function scoresFor(scope) {
  return scope.room.matrix(1, Math.min(TILE_ROWS, scope.rows) * (scope.firstRow + scope.rows));
}

/**
 * softmax(q k^T) over the keys that each row sees, in `scores`.
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Tile} tile
 * @param {Matrix} scores
 */
function probabilities(scope, part, tile, scores) {
  const [rows, keys] = [tile.bottom - tile.top, tile.lastKey - tile.firstKey];
  const p = Object.assign(scores.view(0, 1), { rows, cols: keys, rowStep: keys });
  scope.kernel.product(p, tile.queries, tile.keys.T);
  scope.kernel.call.softmax(
    p.at, scope.mask?.at ?? 0, rows, keys, scope.firstRow + tile.top, tile.firstKey, part.window,
  );
  return p;
}

// ------------------------------------------------------------------------------------------- queries, keys, values

/**
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Cache} cache
 * @param {Matrix} normed
 */
async function fill(scope, part, cache, normed) {
  for (const [weight, cached, isRotated] of /** @type {const} */ ([
    [part.k, cache.keys, part.isRotary], [part.v, cache.values, false],
  ])) {
    const made = await apply(scope, weight, normed);
    if (isRotated) rotate(scope, part, made, false);
    scope.kernel.numbers(cached.view(scope.firstRow, scope.firstRow + scope.rows)).set(scope.kernel.numbers(made));
    scope.room.free(made);
  }
}

/**
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Matrix} normed
 */
async function queriesOf(scope, part, normed) {
  const queries = await apply(scope, part.q, normed);
  if (part.isRotary) rotate(scope, part, queries, false);
  scope.kernel.call.scale_by(queries.at, part.scale, queries.size);
  return queries;
}

/**
 * @param {Scope} scope
 * @param {Attention} part
 * @param {Matrix} heads
 * @param {boolean} isBackward
 */
function rotate(scope, part, heads, isBackward) {
  const table = /** @type {Matrix} */ (scope.rotary);
  scope.kernel.call.rotate(heads.at, table.at, heads.rows, heads.cols, part.headDim, Number(isBackward));
}

/**
 * @param {Scope} scope
 * @param {Attention} part
 */
export function keyWidth(scope, part) {
  return outWidth(scope, part.k);
}
