// A task in progress: it says what can be computed next, in chunks that each yield a rectangle of its result.

import { GemmTask } from "./gemm.mjs";
import { LeaseTask } from "./lease.mjs";
import { CollectTask, HoldTask, ShardTask } from "./resident.mjs";

/** @typedef {import("../kernel.mjs").Matrix} Matrix */

/**
 * What is ready: `run` computes it, `flops` is what that takes, and `part` is the rectangle of the result that it gives;
 * null while a sum is incomplete. `done`, if there, follows once the rectangle was copied.
 * @typedef {{run: (breathe: () => Promise<void> | undefined) => Promise<Matrix | null>, part: Rectangle | null,
 *   flops: number, done?: () => void}} Chunk
 * @typedef {{top: number, rows: number, left: number, cols: number}} Rectangle
 */

/**
 * Call `nextChunk` until `isFinished`, and run each chunk before asking for the next; `dispose` frees what it holds.
 * @typedef {{isFinished: boolean, nextChunk: () => Chunk | null, dispose: () => void}} Task
 */

/**
 * @param {import("./program.mjs").Program} program
 * @param {import("../store.mjs").Store} store
 * @returns {Task}
 */
export function makeTask(program, store) {
  switch (program.program) {
    case "gemm": return new GemmTask(program, store);
    case "forward":
    case "backward": return new ShardTask(program, store);
    case "collect": return new CollectTask(program, store);
    case "hold": return new HoldTask(program, store);
    default: return new LeaseTask(program, store);
  }
}
