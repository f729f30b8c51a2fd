// Read a decoded map field by field, and refuse what is missing or of another type.

import { ProtocolError, require } from "./errors.mjs";

/** @typedef {import("./msgpack.mjs").Unpacked} Unpacked */

/**
 * @param {Unpacked | undefined} value
 * @param {string} what
 */
export function fieldsOf(value, what) {
  require(
    value !== null && typeof value === "object" && !Array.isArray(value),
    `expected ${what} to be a map, got another type`,
  );
  return new Fields(value, what);
}

export class Fields {
  /**
   * @param {{[key: string]: Unpacked}} map
   * @param {string} what
   */
  constructor(map, what) {
    this.map = map;
    this.what = what;
  }

  /** @param {string} key */
  has(key) {
    return this.map[key] !== undefined && this.map[key] !== null;
  }

  /**
   * @param {string} key
   * @param {number} [fallback]
   */
  integer(key, fallback) {
    const value = this.#get(key, fallback);
    if (!Number.isSafeInteger(value)) this.#refuse(key, "an integer", value);
    return /** @type {number} */ (value);
  }

  /** @param {string} key */
  optional(key) {
    return this.has(key) ? this.integer(key) : null;
  }

  /**
   * A number within limits; NaN is outside all of them.
   * @param {string} key
   * @param {{least?: number, most?: number, fallback?: number}} [limits]
   */
  number(key, { least = -1e9, most = 1e9, fallback } = {}) {
    const value = this.#get(key, fallback);
    if (typeof value !== "number" || !(value >= least && value <= most))
      this.#refuse(key, `a number from ${least} to ${most}`, value);
    return /** @type {number} */ (value);
  }

  /**
   * @param {string} key
   * @param {boolean} fallback
   */
  bool(key, fallback) {
    const value = this.#get(key, fallback);
    if (typeof value !== "boolean") this.#refuse(key, "true or false", value);
    return /** @type {boolean} */ (value);
  }

  /**
   * @template {string} T
   * @param {string} key
   * @param {readonly T[]} choices
   * @param {T} [fallback]
   * @returns {T}
   */
  choice(key, choices, fallback) {
    const value = this.#get(key, fallback);
    if (!choices.includes(/** @type {T} */ (value))) this.#refuse(key, `one of ${choices.join(", ")}`, value);
    return /** @type {T} */ (value);
  }

  /** @param {string} key */
  text(key) {
    const value = this.#get(key, undefined);
    if (typeof value !== "string") this.#refuse(key, "text", value);
    return /** @type {string} */ (value);
  }

  /**
   * @param {string} key
   * @param {Unpacked[]} [fallback]
   */
  list(key, fallback) {
    const value = this.#get(key, fallback);
    if (!Array.isArray(value)) this.#refuse(key, "a list", value);
    return /** @type {Unpacked[]} */ (value);
  }

  /**
   * @param {string} key
   * @param {number[]} [fallback]
   */
  integers(key, fallback) {
    return integers(this.list(key, fallback), `${key} of ${this.what}`);
  }

  /**
   * @param {string} key
   * @param {[number, number][]} [fallback]
   */
  pairs(key, fallback) {
    return this.list(key, fallback).map((entry) => pair(entry, `${key} of ${this.what}`));
  }

  /** @param {string} key */
  fields(key) {
    return fieldsOf(this.map[key], `${key} of ${this.what}`);
  }

  /**
   * @param {string} key
   * @param {Unpacked | undefined} fallback
   */
  #get(key, fallback) {
    const value = this.map[key];
    return value === undefined ? fallback : value;
  }

  /**
   * @param {string} key
   * @param {string} expected
   * @param {unknown} value
   */
  #refuse(key, expected, value) {
    const found = value === undefined ? "nothing" : JSON.stringify(value).slice(0, 60);
    throw new ProtocolError(`expected ${key} of ${this.what} to be ${expected}, got ${found}`);
  }
}

/**
 * @param {Unpacked} value
 * @param {string} what
 */
export function integers(value, what) {
  require(
    Array.isArray(value) && value.every((entry) => Number.isSafeInteger(entry)),
    `expected ${what} to be a list of integers, got something else`,
  );
  return /** @type {number[]} */ (value);
}

/**
 * @param {Unpacked} value
 * @param {string} what
 * @returns {[number, number]}
 */
export function pair(value, what) {
  const found = integers(value, what);
  require(found.length === 2, `expected ${what} to be pairs, got a list of ${found.length}`);
  return [found[0], found[1]];
}
