// Room in the linear memory of the kernel: allocate and free by address, first fit, neighbors merged.

const ALIGN = 16;
const PAGE = 65536;

export class Heap {
  /** @type {{at: number, size: number}[]} */
  #free = [];
  /** @type {Map<number, number>} */
  #taken = new Map();
  #end;

  /**
   * @param {WebAssembly.Memory} memory
   * @param {number} base  the first byte that may be used
   * @param {number} limit  bytes of memory at which an allocation fails
   */
  constructor(memory, base, limit) {
    this.memory = memory;
    this.#end = align(base);
    this.limit = limit;
  }

  /**
   * The address of `size` bytes, aligned for vectors. Throws RangeError if there is no room.
   * @param {number} size
   */
  allocate(size) {
    const need = align(Math.max(size, 1));
    let at = -1;
    for (let i = 0; i < this.#free.length; i++) {
      const hole = this.#free[i];
      if (hole.size < need) continue;
      at = hole.at;
      if (hole.size === need) this.#free.splice(i, 1);
      else this.#free[i] = { at: hole.at + need, size: hole.size - need };
      break;
    }
    if (at < 0) {
      at = this.#end;
      this.#grow(at + need);
      this.#end = at + need;
    }
    this.#taken.set(at, need);
    return at;
  }

  /** @param {number} at */
  free(at) {
    const size = this.#taken.get(at);
    if (size === undefined) throw new Error(`nothing is allocated at ${at}`);
    this.#taken.delete(at);
    let i = 0;
    for (let high = this.#free.length; i < high; ) {
      const middle = (i + high) >> 1;
      if (this.#free[middle].at < at) i = middle + 1;
      else high = middle;
    }
    this.#free.splice(i, 0, { at, size });
    if (i + 1 < this.#free.length && at + size === this.#free[i + 1].at) {
      this.#free[i].size += this.#free[i + 1].size;
      this.#free.splice(i + 1, 1);
    }
    if (i > 0 && this.#free[i - 1].at + this.#free[i - 1].size === at) {
      this.#free[i - 1].size += this.#free[i].size;
      this.#free.splice(i, 1);
      i--;
    }
    const last = this.#free[i];
    if (last && last.at + last.size === this.#end) {
      this.#end = last.at;
      this.#free.pop();
    }
  }

  /** Bytes allocated now. */
  get used() {
    let total = 0;
    for (const size of this.#taken.values()) total += size;
    return total;
  }

  /** @param {number} bytes */
  #grow(bytes) {
    if (bytes > this.limit) throw new RangeError(`${bytes} bytes exceed this device's limit of ${this.limit}`);
    const missing = bytes - this.memory.buffer.byteLength;
    if (missing > 0) this.memory.grow(Math.ceil(missing / PAGE));
  }
}

/** @param {number} size */
function align(size) {
  return Math.ceil(size / ALIGN) * ALIGN;
}
