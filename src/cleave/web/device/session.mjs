// One connection to a server: takes messages, computes what is ready, returns results.
//
// Knows neither sockets nor clocks nor pages: whoever made it feeds it byte strings and gets byte strings to send. While
// a chunk is computed, probes are answered at once; everything else waits, in order, for the chunk to end.

import { ProtocolError, require } from "./errors.mjs";
import * as messages from "./messages.mjs";
import { makeTask } from "./programs/task.mjs";
import { Store } from "./store.mjs";

/** @typedef {import("./messages.mjs").FromServer} FromServer */
/** @typedef {import("./programs/task.mjs").Chunk} Chunk */
/** @typedef {import("./programs/task.mjs").Task} Task */

/**
 * @typedef {{name: string, token: string, flopsPerS: number, memoryBytes: number}} Offer
 * @typedef {{send: (bytes: Uint8Array) => void, unsentBytes: () => number, now: () => number,
 *   pause: () => Promise<void>, welcomed: (name: string) => void, idle: (reason: string) => void,
 *   credited?: (doneFlops: number, verifiedFlops: number) => void,
 *   ended: (how: Ending) => void}} Outside  `pause` lets messages in; `now` is in seconds
 * @typedef {{reason: string, rejoin: boolean, isRefused: boolean}} Ending
 * @typedef {{order: number, message: Extract<FromServer, {type: "run"}>, task: Task}} Active
 */

const MOST_TASKS = 64;
const MOST_UNSENT_BYTES = 16 << 20;
const BREATH_S = 0.02;

export class Session {
  /** @type {Map<number, Active>} */
  #tasks = new Map();
  /** @type {{message: FromServer, payload: number} | null} */
  #announced = null;
  /** @type {Uint8Array[]} */
  #parts = [];
  #received = 0;
  #headerS = 0;
  /** @type {{message: FromServer, payload: Uint8Array}[]} */
  #waiting = [];
  #isComputing = false;
  #order = 0;
  #flops = 0;
  #computeS = 0;
  #downBytes = 0;
  #downS = 0;
  #breathS = 0;
  #pausedS = 0;
  #isWelcome = false;
  #hasEnded = false;
  /** What this device has done so far. */
  done = { tasks: 0, flops: 0, computeS: 0, downBytes: 0, upBytes: 0 };

  /**
   * @param {import("./kernel.mjs").Kernel} kernel
   * @param {Offer} offer
   * @param {Outside} outside
   */
  constructor(kernel, offer, outside) {
    this.kernel = kernel;
    this.offer = offer;
    this.outside = outside;
    this.store = new Store(kernel, offer.memoryBytes);
  }

  /** Introduce the device. */
  join() {
    this.#send(messages.hello({ ...this.offer, kernel: this.kernel.name }));
  }

  /** @param {string} reason */
  leave(reason) {
    if (this.#hasEnded) return;
    this.#send(messages.leaving(reason));
    this.#end({ reason, rejoin: false, isRefused: false });
  }

  /**
   * Take one byte string.
   * @param {Uint8Array} bytes
   */
  receive(bytes) {
    if (this.#hasEnded) return;
    try {
      this.#take(bytes);
    } catch (fault) {
      this.#fail(fault);
    }
  }

  /** Bytes that operands, states and accumulators take. */
  get heldBytes() {
    return this.store.usedBytes;
  }

  /** @param {Uint8Array} bytes */
  #take(bytes) {
    this.done.downBytes += bytes.length;
    if (!this.#announced) {
      this.#announced = messages.parse(bytes);
      this.#headerS = this.outside.now();
      this.#received = 0;
      this.#parts = [];
    } else {
      require(bytes.length > 0, "expected a part of a payload, got nothing");
      this.#parts.push(bytes);
      this.#received += bytes.length;
    }
    const { message, payload } = this.#announced;
    require(this.#received <= payload, `expected ${payload} bytes of payload, got ${this.#received}`);
    if (this.#received < payload) return;
    const arrivalS = this.outside.now() - this.#headerS;
    this.#announced = null;
    this.#downBytes += payload;
    if (payload) this.#downS += arrivalS;
    if (message.type === "probe") {
      require(
        message.answer >= 0 && message.answer <= messages.PAYLOAD_BYTES,
        `expected a probe of at most ${messages.PAYLOAD_BYTES} bytes, got ${message.answer}`,
      );
      this.#send(messages.probed(message.answer, arrivalS), new Uint8Array(message.answer));
      if (message.doneFlops !== null) this.outside.credited?.(message.doneFlops, message.verifiedFlops ?? 0);
      return;
    }
    this.#waiting.push({ message, payload: joined(this.#parts, payload) });
    if (!this.#isComputing) void this.#work();
  }

  /** Handle what waits and compute what is ready, until there is neither. */
  async #work() {
    this.#isComputing = true;
    this.#breathS = this.outside.now();
    try {
      for (;;) {
        for (const { message, payload } of this.#waiting.splice(0)) this.#handle(message, payload);
        if (this.#hasEnded) break;
        const next = this.#next();
        if (next) await this.#compute(...next);
        else if (!this.#waiting.length) break;
        await this.#breathe(); // many small chunks in a row may take as long as a large one
      }
    } catch (fault) {
      this.#fail(fault);
    } finally {
      this.#isComputing = false;
      if (this.#hasEnded) this.#clear();
    }
  }

  /**
   * @param {FromServer} message
   * @param {Uint8Array} payload
   */
  #handle(message, payload) {
    if (!this.#isWelcome && !["welcome", "refused", "bye"].includes(message.type))
      throw new ProtocolError(`expected welcome or refused, got ${message.type}`);
    switch (message.type) {
      case "welcome":
        require(
          message.version === messages.VERSION,
          `the server speaks protocol ${message.version}, this page ${messages.VERSION}; reload it`,
        );
        this.#isWelcome = true;
        this.outside.welcomed(message.name);
        break;
      case "refused": this.#end({ reason: message.reason, rejoin: false, isRefused: true }); break;
      case "bye": this.#end({ reason: message.reason, rejoin: message.rejoin, isRefused: false }); break;
      case "idle": this.outside.idle(message.reason); break;
      case "store": this.store.write(message, payload); break;
      case "drop": this.store.drop(message.operands); break;
      case "cancel": message.tasks.forEach((task) => this.#forget(task)); break;
      case "run":
        require(this.#tasks.size < MOST_TASKS, `expected at most ${MOST_TASKS} unfinished tasks, got one more`);
        require(!this.#tasks.has(message.task), `expected a new task, got ${message.task} again`);
        this.#tasks.set(message.task, {
          order: this.#order++, message, task: makeTask(message.program, this.store),
        });
    }
  }

  /**
   * The most urgent chunk that is ready.
   * @returns {[Active, Chunk] | null}
   */
  #next() {
    const tasks = [...this.#tasks.values()].sort(
      (a, b) => a.message.priority - b.message.priority || a.order - b.order,
    );
    for (const active of tasks) {
      try {
        const chunk = active.task.nextChunk();
        if (chunk) return [active, chunk];
      } catch (fault) {
        this.#giveUp(active, fault);
      }
    }
    return null;
  }

  /**
   * @param {Active} active
   * @param {Chunk} chunk
   */
  async #compute(active, chunk) {
    const { task, format } = active.message;
    while (this.outside.unsentBytes() > MOST_UNSENT_BYTES && !this.#hasEnded) await this.outside.pause();
    const startS = this.outside.now(), beforeS = this.#pausedS;
    try {
      const matrix = await chunk.run(() => this.#breathe());
      const payload = chunk.part && matrix ? this.kernel.encode(matrix, format) : null;
      const computeS = this.outside.now() - startS - (this.#pausedS - beforeS);
      this.#flops += chunk.flops;
      this.#computeS += computeS;
      this.done.flops += chunk.flops;
      this.done.computeS += computeS;
      if (payload && chunk.part) this.#return(active, chunk.part, payload);
    } catch (fault) {
      this.#giveUp(active, fault);
    } finally {
      chunk.done?.();
    }
    if (active.task.isFinished && this.#tasks.has(task)) {
      this.done.tasks++;
      this.#forget(task);
    }
  }

  /**
   * Say that a task failed for lack of memory; anything else is no fault of the task.
   * @param {Active} active
   * @param {unknown} fault
   */
  #giveUp({ message: { task } }, fault) {
    if (!(fault instanceof RangeError)) throw fault; // RangeError: no memory
    this.#forget(task);
    this.#send(messages.failed(task, `not enough memory: ${fault.message}`));
  }

  /** Let messages in, if the last time was a while ago. */
  #breathe() {
    const sinceS = this.outside.now();
    if (sinceS - this.#breathS < BREATH_S) return undefined;
    return this.outside.pause().then(() => {
      this.#breathS = this.outside.now();
      this.#pausedS += this.#breathS - sinceS;
    });
  }

  /**
   * @param {Active} active
   * @param {import("./programs/task.mjs").Rectangle} part
   * @param {Uint8Array} payload
   */
  #return(active, part, payload) {
    const { task, format } = active.message;
    const header = messages.result({
      task, firstRow: part.top, rows: part.rows, firstCol: part.left, cols: part.cols, format, flops: this.#flops,
      computeS: this.#computeS, downBytes: this.#downBytes, downS: this.#downS, payload: payload.length,
    });
    this.#flops = this.#computeS = this.#downBytes = this.#downS = 0;
    this.#send(header, payload);
  }

  /**
   * @param {Uint8Array} header
   * @param {Uint8Array} [payload]
   */
  #send(header, payload) {
    if (this.#hasEnded) return;
    this.outside.send(header);
    this.done.upBytes += header.length + (payload?.length ?? 0);
    for (let at = 0; payload && at < payload.length; at += messages.PART_BYTES)
      this.outside.send(payload.subarray(at, at + messages.PART_BYTES));
  }

  /** @param {number} task */
  #forget(task) {
    this.#tasks.get(task)?.task.dispose();
    this.#tasks.delete(task);
  }

  /** @param {unknown} fault */
  #fail(fault) {
    const reason = fault instanceof Error ? fault.message : String(fault);
    if (!(fault instanceof ProtocolError)) console.error(fault);
    this.#end({ reason, rejoin: true, isRefused: false });
  }

  /** @param {Ending} how */
  #end(how) {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    this.outside.ended(how);
    if (!this.#isComputing) this.#clear();
  }

  #clear() {
    for (const task of [...this.#tasks.keys()]) this.#forget(task);
    this.store.clear();
    this.#waiting = [];
  }
}

/**
 * @param {Uint8Array[]} parts
 * @param {number} size
 */
function joined(parts, size) {
  if (parts.length === 1) return parts[0];
  const whole = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
