// Cut results into rectangles that are sent one by one.

/** @typedef {import("./task.mjs").Rectangle} Rectangle */

const RESULT_NUMBERS = 1 << 20; // about 4 MB
const MOST_COLS = 4096;
const LEAST_ROWS = 256;

/**
 * Bands of whole rows of a complete result.
 * @param {number} rows
 * @param {number} cols
 * @returns {Rectangle[]}
 */
export function bands(rows, cols) {
  return [...strips(0, rows, 0, cols, cols, 1)];
}

/**
 * Pieces of a rectangle that are large enough to send by themselves and not too wide.
 * @param {number} top
 * @param {number} bottom
 * @param {number} left
 * @param {number} right
 * @returns {Iterable<Rectangle>}
 */
export function* strips(top, bottom, left, right, mostCols = MOST_COLS, leastRows = LEAST_ROWS) {
  for (let first = left; first < right; first += mostCols) {
    const cols = Math.min(mostCols, right - first), height = Math.max(leastRows, Math.floor(RESULT_NUMBERS / cols));
    for (let row = top; row < bottom; row += height)
      yield { top: row, rows: Math.min(height, bottom - row), left: first, cols };
  }
}
