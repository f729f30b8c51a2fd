// Products on the graphics processor, by WebGPU, where the browser has a real one.
//
// Operands are copied there for each product, so only large ones are worth it; everything else stays with the kernel.

/** @typedef {import("./kernel.mjs").Matrix} Matrix */

/** Operations from which a product outweighs its copies. */
export const LEAST_FLOPS = 2e8;

const TILE = 64; // rows and columns of C per workgroup of 16 x 16, each of which computes 4 x 4

const SCOPES = ["validation", "out-of-memory", "internal"];

const SHADER = `
struct Shape { rows: u32, cols: u32, inner: u32, a_row: u32, a_col: u32, b_row: u32, b_col: u32, unused: u32 }
@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

var<workgroup> a_tile: array<f32, 1024>;  // 64 rows x 16 inner
var<workgroup> b_tile: array<f32, 1024>;  // 16 inner x 64 columns

@compute @workgroup_size(16, 16)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) own: vec3<u32>) {
  let top = group.y * 64u;
  let left = group.x * 64u;
  let lane = own.y * 16u + own.x;
  var sums: array<f32, 16>;
  for (var first = 0u; first < shape.inner; first += 16u) {
    for (var part = 0u; part < 4u; part++) {
      let at = part * 256u + lane;
      let row = top + at / 16u;
      let depth = first + at % 16u;
      var value = 0.0;
      if (row < shape.rows && depth < shape.inner) { value = a[row * shape.a_row + depth * shape.a_col]; }
      a_tile[at] = value;
      let col = left + at % 64u;
      let below = first + at / 64u;
      value = 0.0;
      if (col < shape.cols && below < shape.inner) { value = b[below * shape.b_row + col * shape.b_col]; }
      b_tile[at] = value;
    }
    workgroupBarrier();
    for (var k = 0u; k < 16u; k++) {
      for (var i = 0u; i < 4u; i++) {
        let x = a_tile[(own.y * 4u + i) * 16u + k];
        for (var j = 0u; j < 4u; j++) { sums[i * 4u + j] += x * b_tile[k * 64u + own.x * 4u + j]; }
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < 4u; i++) {
    for (var j = 0u; j < 4u; j++) {
      let row = top + own.y * 4u + i;
      let col = left + own.x * 4u + j;
      if (row < shape.rows && col < shape.cols) { c[row * shape.cols + col] = sums[i * 4u + j]; }
    }
  }
}`;

export class Gpu {
  /**
   * @param {any} device
   * @param {any} pipeline
   * @param {string} name
   */
  constructor(device, pipeline, name) {
    this.device = device;
    this.pipeline = pipeline;
    this.name = name;
    this.isLost = false;
    void device.lost.then(() => { this.isLost = true; });
  }

  /**
   * The browser's graphics processor, or null: a software adapter is slower than the kernel, unless `any` will do.
   * @param {{any?: boolean}} [wanted]
   * @returns {Promise<Gpu | null>}
   */
  static async open({ any = false } = {}) {
    try {
      const adapter = await /** @type {any} */ (navigator).gpu?.requestAdapter();
      const isSoftware = adapter?.info?.isFallbackAdapter ?? adapter?.isFallbackAdapter ?? false;
      if (!adapter || ((isSoftware || /swiftshader|llvmpipe/i.test(adapter.info?.description ?? "")) && !any)) return null;
      const device = await adapter.requestDevice({
        requiredLimits: {
          maxBufferSize: adapter.limits.maxBufferSize,
          maxStorageBufferBindingSize: adapter.limits.maxStorageBufferBindingSize,
        },
      });
      const module = device.createShaderModule({ code: SHADER });
      const pipeline = await device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: "main" } });
      return new Gpu(device, pipeline, adapter.info?.vendor || "gpu");
    } catch {
      return null;
    }
  }

  /**
   * The entries of a b, row by row. Throws if the graphics processor cannot do it.
   * @param {ArrayBufferLike} memory
   * @param {Matrix} a
   * @param {Matrix} b
   * @returns {Promise<Float32Array>}
   */
  async product(memory, a, b) {
    const { device, pipeline } = this, rows = a.rows, cols = b.cols;
    // WebGPU throws nothing when a buffer is too large or memory runs out: what was read back would be zeros
    SCOPES.forEach((scope) => device.pushErrorScope(scope));
    const usage = /** @type {any} */ (globalThis).GPUBufferUsage;
    const make = (/** @type {number} */ size, /** @type {number} */ use) => device.createBuffer({ size, usage: use });
    const shape = make(32, usage.UNIFORM | usage.COPY_DST);
    device.queue.writeBuffer(shape, 0, Uint32Array.of(rows, cols, a.cols, a.rowStep, a.colStep, b.rowStep, b.colStep, 0));
    const operands = [a, b].map((matrix) => {
      const size = 4 * ((matrix.rows - 1) * matrix.rowStep + (matrix.cols - 1) * matrix.colStep + 1);
      const buffer = make(size, usage.STORAGE | usage.COPY_DST);
      device.queue.writeBuffer(buffer, 0, memory, matrix.at, size);
      return buffer;
    });
    const result = make(4 * rows * cols, usage.STORAGE | usage.COPY_SRC);
    const read = make(4 * rows * cols, usage.MAP_READ | usage.COPY_DST);
    const entries = [shape, ...operands, result].map((buffer, binding) => ({ binding, resource: { buffer } }));
    const commands = device.createCommandEncoder(), pass = commands.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(Math.ceil(cols / TILE), Math.ceil(rows / TILE));
    pass.end();
    commands.copyBufferToBuffer(result, 0, read, 0, 4 * rows * cols);
    device.queue.submit([commands.finish()]);
    const mode = /** @type {any} */ (globalThis).GPUMapMode.READ;
    try {
      const [, ...faults] = await Promise.all([read.mapAsync(mode), ...SCOPES.map(() => device.popErrorScope())]);
      const fault = faults.find((one) => one !== null);
      if (fault) throw new Error(fault.message);
      return new Float32Array(read.getMappedRange().slice(0));
    } finally {
      for (const buffer of [shape, ...operands, result, read]) buffer.destroy();
    }
  }
}
