// Messages between server and device (docs/protocol.md): those of a device are built here, those of a server checked.

import { fieldsOf } from "./fields.mjs";
import { ProtocolError, require } from "./errors.mjs";
import { FORMATS } from "./kernel.mjs";
import { decode, encode, Float } from "./msgpack.mjs";
import { parseProgram } from "./programs/program.mjs";

/** @typedef {import("./kernel.mjs").Format} Format */
/** @typedef {import("./programs/program.mjs").Program} Program */

export const VERSION = 4;
export const HEADER_BYTES = 1 << 16;
export const PAYLOAD_BYTES = 1 << 26;
export const PART_BYTES = 4 << 20;
const CREDIT = { least: 0, most: 1e30 };

/**
 * @typedef {{type: "welcome", version: number, name: string}
 *   | {type: "refused", reason: string}
 *   | {type: "probe", answer: number, doneFlops: number | null, verifiedFlops: number | null}
 *   | {type: "store", operand: number, rows: number, cols: number, format: Format, firstRow: number, stripRows: number}
 *   | {type: "run", task: number, priority: number, program: Program, format: Format}
 *   | {type: "drop", operands: number[]}
 *   | {type: "cancel", tasks: number[]}
 *   | {type: "idle", reason: string}
 *   | {type: "bye", reason: string, rejoin: boolean}} FromServer
 */

/**
 * Decode a header of the server's: the message, and how many bytes of payload follow.
 * @param {Uint8Array} header
 * @returns {{message: FromServer, payload: number}}
 */
export function parse(header) {
  require(header.length <= HEADER_BYTES, `expected a header of at most ${HEADER_BYTES} bytes, got ${header.length}`);
  const fields = fieldsOf(decode(header), "a header");
  const payload = fields.integer("payload", 0);
  require(payload >= 0 && payload <= PAYLOAD_BYTES, `expected a payload of at most ${PAYLOAD_BYTES} bytes, got ${payload}`);
  return { message: parseMessage(fields), payload };
}

/**
 * @param {import("./fields.mjs").Fields} fields
 * @returns {FromServer}
 */
function parseMessage(fields) {
  const type = fields.text("type");
  switch (type) {
    case "welcome": return { type, version: fields.integer("version"), name: printable(fields.text("name")) };
    case "refused": return { type, reason: printable(fields.text("reason")) };
    case "probe": return {
      type,
      answer: fields.integer("answer"),
      doneFlops: fields.has("done_flops") ? fields.number("done_flops", CREDIT) : null,
      verifiedFlops: fields.has("verified_flops") ? fields.number("verified_flops", CREDIT) : null,
    };
    case "store":
      return {
        type,
        operand: fields.integer("operand"),
        rows: fields.integer("rows"),
        cols: fields.integer("cols"),
        format: fields.choice("format", FORMATS),
        firstRow: fields.integer("first_row"),
        stripRows: fields.integer("strip_rows"),
      };
    case "run":
      return {
        type,
        task: fields.integer("task"),
        priority: fields.integer("priority"),
        program: parseProgram(fields.fields("program")),
        format: fields.choice("format", FORMATS),
      };
    case "drop": return { type, operands: fields.integers("operands") };
    case "cancel": return { type, tasks: fields.integers("tasks") };
    case "idle": return { type, reason: printable(fields.text("reason")) };
    case "bye": return { type, reason: printable(fields.text("reason")), rejoin: fields.bool("rejoin", false) };
    default: throw new ProtocolError(`expected a message of a server, got ${JSON.stringify(type).slice(0, 60)}`);
  }
}

/** @param {{name: string, token: string, flopsPerS: number, memoryBytes: number, kernel: string}} offer */
export function hello({ name, token, flopsPerS, memoryBytes, kernel }) {
  return encode({
    type: "hello", payload: 0, version: VERSION, name, token, flops_per_s: new Float(flopsPerS),
    memory_bytes: memoryBytes, kernel,
  });
}

/**
 * @param {number} payload
 * @param {number} downS
 */
export function probed(payload, downS) {
  return encode({ type: "probed", payload, down_s: new Float(downS) });
}

/**
 * @param {{task: number, firstRow: number, rows: number, firstCol: number, cols: number, format: Format, flops: number,
 *   computeS: number, downBytes: number, downS: number, payload: number}} result
 */
export function result({ task, firstRow, rows, firstCol, cols, format, flops, computeS, downBytes, downS, payload }) {
  return encode({
    type: "result", payload, task, first_row: firstRow, rows, first_col: firstCol, cols, format,
    flops: new Float(flops), compute_s: new Float(computeS), down_bytes: downBytes, down_s: new Float(downS),
  });
}

/**
 * @param {number} task
 * @param {string} reason
 */
export function failed(task, reason) {
  return encode({ type: "failed", payload: 0, task, reason: reason.slice(0, 200) });
}

/** @param {string} reason */
export function leaving(reason) {
  return encode({ type: "leaving", payload: 0, reason });
}

/**
 * A stranger's words on one line, without control characters.
 * @param {string} text
 */
function printable(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]+/gu, " ").slice(0, 400);
}
