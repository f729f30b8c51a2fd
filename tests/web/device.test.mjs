// The browser's device against the golden frames that Python's device passes too.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Matrix } from "../../src/cleave/web/device/kernel.mjs";
import * as messages from "../../src/cleave/web/device/messages.mjs";
import { bytesOf, casesOf, floatsOf, hexOf, loadKernel, matrixOf, Played } from "./vectors.mjs";

const CLOSE = 1e-5;
const kernel = await loadKernel();

for (const { name, message, header_hex, ...rest } of casesOf("messages")) {
  if (rest.from === "server") {
    test(`reads the message ${name}`, () => {
      const read = messages.parse(bytesOf(header_hex));
      assert.equal(read.message.type, message.type);
      assert.equal(read.payload, message.payload);
    });
  } else {
    test(`writes the message ${name} byte for byte`, () => {
      /** @type {{[type: string]: () => Uint8Array}} */
      const builders = {
        hello: () => messages.hello({
          name: message.name, token: message.token, flopsPerS: message.flops_per_s, memoryBytes: message.memory_bytes,
          kernel: message.kernel,
        }),
        probed: () => messages.probed(message.payload, message.down_s),
        result: () => messages.result({
          task: message.task, firstRow: message.first_row, rows: message.rows, firstCol: message.first_col,
          cols: message.cols, format: message.format, flops: message.flops, computeS: message.compute_s,
          downBytes: message.down_bytes, downS: message.down_s, payload: message.payload,
        }),
        failed: () => messages.failed(message.task, message.reason),
        leaving: () => messages.leaving(message.reason),
      };
      assert.equal(hexOf(builders[message.type]()), header_hex);
    });
  }
}

for (const { name, format, rows, cols, values_fp32_hex, hex, decoded_fp32_hex } of casesOf("numbers")) {
  test(`rounds and reads numbers as in ${name}`, () => {
    const matrix = kernel.allocate(rows, cols);
    kernel.numbers(matrix).set(floatsOf(values_fp32_hex));
    assert.equal(hexOf(kernel.encode(matrix, format)), hex);
    kernel.decode(matrix, bytesOf(hex), format);
    const found = kernel.numbers(matrix), expected = floatsOf(decoded_fp32_hex);
    expected.forEach((number, i) => assert.ok(Object.is(found[i], number), `${found[i]} is not ${number}`));
    kernel.free(matrix);
  });
}

for (const test_case of casesOf("tasks")) {
  test(`answers the task ${test_case.name} with the whole block`, async () => {
    const played = new Played(kernel);
    played.welcome();
    for (const frame of test_case.frames) if (frame.from === "server") played.play(frame);
    await played.settle();
    const run = test_case.frames.find((/** @type {any} */ frame) => frame.message.type === "run").message;
    const block = matrixOf(test_case.block);
    const found = assembled(played.answers, block, run.format);
    const slack = run.format === "q8" ? 0.5001 / 126 : 0;
    found.forEach((number, i) => {
      const row = Math.floor(i / block.cols) * block.cols;
      const most = Math.max(...block.numbers.subarray(row, row + block.cols).map(Math.abs));
      assert.ok(Math.abs(number - block.numbers[i]) <= slack * most, `${number} is not ${block.numbers[i]}`);
    });
  });
}

for (const { name, frames, results } of casesOf("resident")) {
  test(`takes sequences forward and back as in ${name}`, async () => {
    const played = new Played(kernel);
    played.welcome();
    for (const frame of frames) {
      if (frame.from === "server") {
        played.play(frame);
        continue;
      }
      await played.settle();
      const answer = played.answers.shift();
      assert.ok(answer, `no answer where ${JSON.stringify(frame.message)} was expected`);
      for (const field of ["type", "task", "first_row", "rows", "first_col", "cols"])
        assert.equal(answer.header[field], frame.message[field], field);
      const expected = matrixOf(results[frame.message.task]).numbers, found = new Float32Array(Uint8Array.from(answer.payload).buffer);
      const most = Math.max(1, ...expected.map(Math.abs));
      assert.equal(found.length, expected.length);
      expected.forEach((number, i) => assert.ok(Math.abs(found[i] - number) <= CLOSE * most, `${found[i]} is not ${number}`));
    }
    assert.deepEqual(played.answers, []);
  });
}

for (const { name, frames } of casesOf("session")) {
  test(`follows the session ${name}`, async () => {
    const offer = frames[0].message;
    const played = new Played(kernel, { name: offer.name, memoryBytes: offer.memory_bytes, flopsPerS: offer.flops_per_s });
    played.session.join();
    for (const frame of frames) {
      if (frame.from === "server") {
        played.play(frame);
        continue;
      }
      await played.settle();
      const answer = played.answers.shift();
      assert.ok(answer);
      assert.equal(answer.header.type, frame.message.type);
      for (const [field, value] of Object.entries(frame.message))
        if (!["down_s", "compute_s", "kernel"].includes(field)) assert.equal(answer.header[field], value, field);
      assert.equal(hexOf(answer.payload), frame.payload_hex);
    }
    await played.settle();
    assert.deepEqual(played.ending, { reason: "done", rejoin: false, isRefused: false });
  });
}

test("frees everything it took", async () => {
  const before = kernel.heap.used;
  for (const { frames } of [...casesOf("resident"), ...casesOf("tasks")]) {
    const played = new Played(kernel);
    played.welcome();
    for (const frame of frames) {
      if (frame.from === "server") played.play(frame);
      await played.settle();
    }
    played.session.leave("enough");
  }
  assert.equal(kernel.heap.used, before);
});

test("refuses operands beyond the memory it offered", async () => {
  const played = new Played(kernel, { memoryBytes: 15 });
  played.welcome();
  played.play(casesOf("messages").find((one) => one.name === "store"));
  await new Promise((resolve) => setImmediate(resolve));
  assert.match(played.ending.reason, /16 more bytes where 15 of 15 are free/);
});

for (const [firstRow, rows, below] of /** @type {[number, number, number[]][]} */ (
  [[-1, 1, []], [1, 2, []], [2, 1, []], [0, 3, []], [1, 2, [17]]]
)) {
  test(`refuses to return ${rows} rows from ${firstRow} of an operand of two, and ${below.length} below`, async () => {
    const played = new Played(kernel);
    played.welcome();
    played.play(casesOf("messages").find((one) => one.name === "store"));
    played.run(9, { program: "collect", accumulator: 17, rows, cols: 2, below, first_row: firstRow });
    await new Promise((resolve) => setImmediate(resolve));
    assert.match(played.ending.reason, /row/);
    assert.deepEqual(played.answers, []);
  });
}

test("a state beyond this browser's memory fails its task alone, and leaves nothing behind", async () => {
  const { frames } = casesOf("resident").find((one) => one.name === "llama-block");
  const begin = frames.findIndex((/** @type {any} */ { message }) => message.program?.program === "forward");
  const before = kernel.heap.used, played = new Played(kernel, { memoryBytes: 1 << 30 });
  played.welcome();
  for (const [i, frame] of frames.entries()) {
    if (i === begin) played.run(frame.message.task, { ...frame.message.program, sequence: 1_250_000 }); // keys fit, values do not
    else if (frame.from === "server") played.play(frame);
    else if (i > begin) break;
  }
  await played.settle();
  assert.deepEqual(played.answers.map(({ header }) => header.type), ["result", "failed"]);
  assert.match(played.answers[1].header.reason, /not enough memory/);
  assert.equal(played.ending, null);
  played.session.leave("enough");
  assert.equal(kernel.heap.used, before);
});

test("refuses a task that it has, as its result would never be freed", async () => {
  const played = new Played(kernel);
  played.welcome();
  for (let i = 0; i < 2; i++) played.run(9, { program: "hold", operands: [17] });
  await new Promise((resolve) => setImmediate(resolve));
  assert.match(played.ending.reason, /got 9 again/);
});

test("a window beyond all rows is as good as none", async () => {
  const { frames, results } = casesOf("resident").find((one) => one.name === "llama-block");
  const begin = frames.findIndex((/** @type {any} */ { message }) => message.program?.program === "forward");
  const { task, program } = frames[begin].message;
  const widened = program.parts.map((/** @type {any} */ part) => (
    part.part === "attention" ? { ...part, window: 2 ** 32 + 1 } : part
  ));
  const given = program.parts.map((/** @type {any} */ part) => (
    part.part === "attention" ? { ...part, window: undefined } : part
  ));
  /** @type {Float32Array[]} */
  const found = [];
  for (const parts of [widened, given]) {
    const played = new Played(kernel);
    played.welcome();
    for (const [i, frame] of frames.entries()) {
      if (i === begin) played.run(task, JSON.parse(JSON.stringify({ ...program, parts })));
      else if (frame.from === "server") played.play(frame);
      else if (i > begin) break;
    }
    await played.settle();
    const answer = played.answers[played.answers.length - 1];
    found.push(new Float32Array(Uint8Array.from(answer.payload).buffer));
    played.session.leave("enough");
  }
  assert.equal(found[0].length, results[task].flat().length);
  assert.deepEqual(found[0], found[1]);
});

test("passes on what the server credits this device with, and survives servers that do not say", async () => {
  /** @type {number[][]} */
  const credits = [];
  const played = new Played(kernel, {}, { credited: (done, verified) => credits.push([done, verified]) });
  played.welcome();
  for (const name of ["probe-without-payload", "heartbeat"]) played.play(casesOf("messages").find((one) => one.name === name));
  await played.settle();
  assert.equal(played.answers.length, 2);
  assert.deepEqual(credits, [[3e9, 1e9]]);
});

test("answers a probe between many small tasks", async () => {
  let seconds = 0, isAsked = false;
  const pause = async () => {
    if (!isAsked) played.play(casesOf("messages").find((one) => one.name === "probe"));
    isAsked = true;
  };
  const played = new Played(kernel, {}, { now: () => (seconds += 0.001), pause });
  played.welcome();
  for (let task = 1; task <= 40; task++) played.run(task, { program: "hold", operands: [] });
  await played.settle();
  const types = played.answers.map(({ header }) => header.type);
  assert.equal(types.length, 41);
  const at = types.indexOf("probed");
  assert.ok(at >= 0 && at < 30, `the probe was answered after ${at} tasks`);
});

/**
 * @param {any[]} answers
 * @param {{rows: number, cols: number, numbers: Float32Array}} block
 * @param {import("../../src/cleave/web/device/kernel.mjs").Format} format
 */
function assembled(answers, block, format) {
  const whole = new Float32Array(block.numbers.length).fill(NaN);
  for (const { header, payload } of answers) {
    assert.equal(header.type, "result");
    const part = kernel.allocate(header.rows, header.cols);
    kernel.decode(part, payload, format);
    const numbers = kernel.numbers(part);
    for (let i = 0; i < header.rows; i++)
      for (let j = 0; j < header.cols; j++) {
        const at = (header.first_row + i) * block.cols + header.first_col + j;
        assert.ok(Number.isNaN(whole[at]), "an entry came twice");
        whole[at] = numbers[i * header.cols + j];
      }
    kernel.free(part);
  }
  assert.ok(!whole.includes(NaN), "an entry is missing");
  return whole;
}

test("multiplies any shape and any layout", () => {
  for (const [m, n, k] of [[1, 1, 1], [3, 5, 7], [4, 8, 256], [97, 513, 300], [5, 600, 2]])
    for (const layout of ["nt", "nn", "tn"])
      for (const adds of [false, true]) {
        const a = layout === "tn" ? filled(k, m, 1).T : filled(m, k, 1), b = layout === "nt" ? filled(n, k, 2).T : filled(k, n, 2);
        const c = filled(m, n, 3), before = kernel.numbers(c).slice();
        kernel.product(c, a, b, adds);
        const found = kernel.numbers(c), [x, y] = [valuesOf(a), valuesOf(b)];
        for (let i = 0; i < m; i++)
          for (let j = 0; j < n; j++) {
            let sum = adds ? before[i * n + j] : 0;
            for (let l = 0; l < k; l++) sum += x(i, l) * y(l, j);
            assert.ok(Math.abs(sum - found[i * n + j]) < 1e-5 * Math.sqrt(k + 1), `${layout} ${m} ${n} ${k}`);
          }
        for (const matrix of [a, b, c]) kernel.free(matrix);
      }
});

/**
 * @param {number} rows
 * @param {number} cols
 * @param {number} seed
 */
function filled(rows, cols, seed) {
  const matrix = kernel.allocate(rows, cols), numbers = kernel.numbers(matrix);
  for (let i = 0; i < numbers.length; i++) numbers[i] = Math.sin(12.9898 * (i + 1) * seed) ;
  return matrix;
}

/** @param {Matrix} matrix */
function valuesOf(matrix) {
  const all = new Float32Array(kernel.heap.memory.buffer);
  return (/** @type {number} */ i, /** @type {number} */ j) => all[matrix.at / 4 + i * matrix.rowStep + j * matrix.colStep];
}
