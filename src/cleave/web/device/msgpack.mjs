// MessagePack, as far as headers need it: maps with text keys, lists, text, integers, floats, booleans, nil.
//
// JavaScript has one type of number, MessagePack two: wrap a number in `Float` to write it as one.

import { ProtocolError, require } from "./errors.mjs";

/** A number that is written as a 64-bit float even if it is whole. */
export class Float {
  /** @param {number} value */
  constructor(value) {
    this.value = value;
  }
}

/** @typedef {null | boolean | number | string | Float | any[] | {[key: string]: any}} Packable  nested at will */
/** @typedef {null | boolean | number | string | any[] | {[key: string]: any}} Unpacked  nested at will */

const MOST_DEEP = 32;

/**
 * @param {Packable} value
 * @returns {Uint8Array}
 */
export function encode(value) {
  /** @type {number[]} */
  const bytes = [];
  write(bytes, value);
  return Uint8Array.from(bytes);
}

/**
 * @param {number[]} bytes
 * @param {Packable} value
 */
function write(bytes, value) {
  if (value === null) bytes.push(0xc0);
  else if (typeof value === "boolean") bytes.push(value ? 0xc3 : 0xc2);
  else if (typeof value === "number") writeInteger(bytes, value);
  else if (value instanceof Float) writeBits(bytes, 0xcb, 8, (view) => view.setFloat64(0, value.value));
  else if (typeof value === "string") {
    const text = new TextEncoder().encode(value);
    writeLength(bytes, text.length, [[0xa0, 31]], [0xd9, 0xda, 0xdb]);
    for (const byte of text) bytes.push(byte);
  } else if (Array.isArray(value)) {
    writeLength(bytes, value.length, [[0x90, 15]], [0, 0xdc, 0xdd]);
    for (const entry of value) write(bytes, entry);
  } else {
    const entries = Object.entries(value);
    writeLength(bytes, entries.length, [[0x80, 15]], [0, 0xde, 0xdf]);
    for (const [key, entry] of entries) {
      write(bytes, key);
      write(bytes, entry);
    }
  }
}

/**
 * @param {number[]} bytes
 * @param {number} value
 */
function writeInteger(bytes, value) {
  if (!Number.isSafeInteger(value)) throw new TypeError(`${value} is no integer; wrap it in Float`);
  if (value >= 0) {
    if (value < 0x80) bytes.push(value);
    else if (value < 0x100) bytes.push(0xcc, value);
    else if (value < 0x10000) writeBits(bytes, 0xcd, 2, (view) => view.setUint16(0, value));
    else if (value < 0x100000000) writeBits(bytes, 0xce, 4, (view) => view.setUint32(0, value));
    else writeBits(bytes, 0xcf, 8, (view) => view.setBigUint64(0, BigInt(value)));
  } else if (value >= -32) bytes.push(value & 0xff);
  else if (value >= -0x80) bytes.push(0xd0, value & 0xff);
  else if (value >= -0x8000) writeBits(bytes, 0xd1, 2, (view) => view.setInt16(0, value));
  else if (value >= -0x80000000) writeBits(bytes, 0xd2, 4, (view) => view.setInt32(0, value));
  else writeBits(bytes, 0xd3, 8, (view) => view.setBigInt64(0, BigInt(value)));
}

/**
 * @param {number[]} bytes
 * @param {number} tag
 * @param {number} size
 * @param {(view: DataView) => void} put
 */
function writeBits(bytes, tag, size, put) {
  const view = new DataView(new ArrayBuffer(size));
  put(view);
  bytes.push(tag, ...new Uint8Array(view.buffer));
}

/**
 * @param {number[]} bytes
 * @param {number} length
 * @param {[number, number][]} short  tag and the most it can count
 * @param {[number, number, number]} tags  of lengths of 8, 16 and 32 bits; 0 where there is none
 */
function writeLength(bytes, length, [[tag, most]], [tag8, tag16, tag32]) {
  if (length <= most) bytes.push(tag | length);
  else if (length < 0x100 && tag8) bytes.push(tag8, length);
  else if (length < 0x10000) writeBits(bytes, tag16, 2, (view) => view.setUint16(0, length));
  else writeBits(bytes, tag32, 4, (view) => view.setUint32(0, length));
}

/**
 * Decode exactly one value. Raises ProtocolError.
 * @param {Uint8Array} bytes
 * @returns {Unpacked}
 */
export function decode(bytes) {
  const reader = new Reader(bytes);
  try {
    const value = reader.value(0);
    require(reader.at === bytes.length, `expected one header, got ${bytes.length - reader.at} bytes after it`);
    return value;
  } catch (fault) {
    if (fault instanceof RangeError || fault instanceof TypeError)
      throw new ProtocolError(`expected a header in MessagePack, got ${fault.message}`);
    throw fault;
  }
}

class Reader {
  at = 0;

  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  /**
   * @param {number} depth
   * @returns {Unpacked}
   */
  value(depth) {
    require(depth <= MOST_DEEP, `expected at most ${MOST_DEEP} levels in a header, got more`);
    const tag = this.next(1).getUint8(0);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return this.map(tag & 15, depth);
    if (tag < 0xa0) return this.list(tag & 15, depth);
    if (tag < 0xc0) return this.text(tag & 31);
    if (tag >= 0xe0) return tag - 0x100;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xca: return this.next(4).getFloat32(0);
      case 0xcb: return this.next(8).getFloat64(0);
      case 0xcc: return this.next(1).getUint8(0);
      case 0xcd: return this.next(2).getUint16(0);
      case 0xce: return this.next(4).getUint32(0);
      case 0xcf: return Number(this.next(8).getBigUint64(0));
      case 0xd0: return this.next(1).getInt8(0);
      case 0xd1: return this.next(2).getInt16(0);
      case 0xd2: return this.next(4).getInt32(0);
      case 0xd3: return Number(this.next(8).getBigInt64(0));
      case 0xd9: return this.text(this.next(1).getUint8(0));
      case 0xda: return this.text(this.next(2).getUint16(0));
      case 0xdb: return this.text(this.next(4).getUint32(0));
      case 0xdc: return this.list(this.next(2).getUint16(0), depth);
      case 0xdd: return this.list(this.next(4).getUint32(0), depth);
      case 0xde: return this.map(this.next(2).getUint16(0), depth);
      case 0xdf: return this.map(this.next(4).getUint32(0), depth);
      default: throw new ProtocolError(`expected a header without the MessagePack type 0x${tag.toString(16)}, got it`);
    }
  }

  /** @param {number} size */
  next(size) {
    require(this.at + size <= this.bytes.length, `expected ${size} more bytes in a header, got its end`);
    this.at += size;
    return new DataView(this.view.buffer, this.view.byteOffset + this.at - size, size);
  }

  /** @param {number} length */
  text(length) {
    const view = this.next(length);
    return new TextDecoder("utf-8", { fatal: true }).decode(view);
  }

  /**
   * @param {number} length
   * @param {number} depth
   */
  list(length, depth) {
    require(length <= this.bytes.length - this.at, `expected a list within its header, got ${length} entries`);
    return Array.from({ length }, () => this.value(depth + 1));
  }

  /**
   * @param {number} length
   * @param {number} depth
   */
  map(length, depth) {
    /** @type {{[key: string]: Unpacked}} */
    const map = Object.create(null);
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      require(typeof key === "string", `expected text as a key of a header, got ${typeof key}`);
      map[key] = this.value(depth + 1);
    }
    return map;
  }
}
