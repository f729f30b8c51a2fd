// What the events of a run add up to; pure, so that live, finished and simulated runs look alike.

/** @typedef {{event: string, time_s: number, [field: string]: any}} Event  a line of a run's events.jsonl */
/**
 * @typedef {object} Step
 * @property {number} step
 * @property {number} loss
 * @property {number} seconds
 * @property {number | null} predicted
 * @property {number} tokens
 * @property {number} downBytes
 * @property {number} upBytes
 */

const MOST_LINES = 500;

export class History {
  /** @type {Event | null} */
  started = null;
  /** @type {Event | null} */
  finished = null;
  /** @type {Event | null} */
  energy = null;
  /** @type {Step[]} */
  steps = [];
  /** @type {{step: number, loss: number}[]} */
  evaluations = [];
  /** @type {Map<string, {event: Event, isHere: boolean}>} */
  devices = new Map();
  grain = "";
  paused = "";
  /** @type {{timeS: number, text: string, kind: "good" | "bad" | "plain"}[]} */
  lines = [];
  downBytes = 0;
  upBytes = 0;

  /** @param {Event} event */
  add(event) {
    const line = describe(event);
    if (line) {
      this.lines.push({ timeS: event.time_s, ...line });
      if (this.lines.length > 2 * MOST_LINES) this.lines = this.lines.slice(-MOST_LINES);
    }
    if (event.event !== "paused" && event.event !== "note") this.paused = "";
    switch (event.event) {
      case "run_started":
        this.started = event;
        this.finished = null;
        break;
      case "step_done": this.#step(event); break;
      case "evaluated": this.evaluations.push({ step: event.step, loss: event.loss ?? NaN }); break;
      case "rolled_back":
        this.steps = this.steps.filter(({ step }) => step <= event.step);
        this.evaluations = this.evaluations.filter(({ step }) => step <= event.step);
        break;
      case "device_joined": this.devices.set(event.device, { event, isHere: true }); break;
      case "device_left": {
        const device = this.devices.get(event.device);
        if (device) device.isHere = false;
        break;
      }
      case "grain_chosen": this.grain = `${event.grain}: ${event.reason}`; break;
      case "paused": this.paused = event.reason; break;
      case "energy_used": this.energy = event; break;
      case "run_finished": this.finished = event; break;
    }
  }

  /** Tokens per second over the latest steps. */
  get tokensPerS() {
    const latest = this.steps.slice(-8);
    const seconds = latest.reduce((total, { seconds: one }) => total + one, 0);
    return seconds > 0 ? latest.reduce((total, { tokens }) => total + tokens, 0) / seconds : null;
  }

  /** @param {Event} event */
  #step(event) {
    this.steps.push({
      step: event.step,
      loss: event.loss ?? NaN, // JSON has no NaN: that of a loss that diverged is null
      seconds: event.seconds,
      predicted: event.predicted_s ?? null,
      tokens: event.tokens,
      downBytes: event.down_bytes,
      upBytes: event.up_bytes,
    });
    this.downBytes += event.down_bytes;
    this.upBytes += event.up_bytes;
  }
}

/**
 * Describe an event in words; null for those that charts show.
 * @param {Event} event
 * @returns {{text: string, kind: "good" | "bad" | "plain"} | null}
 */
export function describe(event) {
  switch (event.event) {
    case "run_started":
      return { kind: "plain", text: `training ${event.model}, ${event.steps} steps of ${event.tokens_per_step} tokens` };
    case "device_joined":
      return { kind: "good", text: `${event.device} joined: ${(event.flops_per_s / 1e9).toFixed(1)} GFLOP/s (${event.kernel})` };
    case "device_left": {
      const lost = event.lost_tasks ? `; ${event.lost_tasks} tasks go to other devices` : "";
      return { kind: "bad", text: `${event.device} left: ${event.reason}${lost}` };
    }
    case "device_late": return { kind: "bad", text: `${event.device} is late` };
    case "device_idle": return { kind: "plain", text: `${event.device} has no work: ${event.reason}` };
    case "grain_chosen": return { kind: "plain", text: `grain ${event.grain}: ${event.reason}` };
    case "result_refused": return { kind: "bad", text: `a result from ${event.device} was refused: ${event.reason}` };
    case "audited":
      return event.is_right ? null : { kind: "bad", text: `an audit found wrong results from ${event.device}` };
    case "rolled_back":
      return { kind: "bad", text: `went back from step ${event.from_step} to ${event.step}: results from ${event.device} were wrong` };
    case "recovered":
      return { kind: "good", text: `other devices did ${event.blocks} blocks of ${event.device} in ${event.seconds.toFixed(2)} s` };
    case "paused": return { kind: "plain", text: event.reason };
    case "note": return { kind: "plain", text: event.text };
    case "checkpoint_saved": return { kind: "plain", text: `saved a checkpoint of step ${event.step}` };
    case "resumed": return { kind: "plain", text: `resumed from step ${event.step}` };
    case "run_finished": return { kind: "plain", text: `finished at step ${event.step}: ${event.reason}` };
    default: return null;
  }
}

/**
 * Thin out points to at most `most`: the smallest and the largest of each stretch, so that no peak is lost.
 * @param {[number, number][]} points
 * @param {number} most
 * @returns {[number, number][]}
 */
export function thinned(points, most) {
  if (points.length <= most) return points;
  const stretch = Math.ceil(points.length / (most / 2));
  /** @type {[number, number][]} */
  const kept = [];
  for (let i = 0; i < points.length; i += stretch) {
    const some = points.slice(i, i + stretch);
    const low = some.reduce((a, b) => (b[1] < a[1] ? b : a)), high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] < high[0] ? [low, high] : low === high ? [low] : [high, low]));
  }
  return kept;
}
