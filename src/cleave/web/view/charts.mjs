// Pictures in SVG: lines over steps, and the tiling of a step.

import { thinned } from "./history.mjs";

const SVG = "http://www.w3.org/2000/svg";
const MOST_POINTS = 600;
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [600, 220, 52, 26, 10, 12];

/** @typedef {{name: string, className: string, points: [number, number][]}} Line */

/**
 * Draw lines, with a table-like description for those who cannot see them.
 * @param {HTMLElement} into
 * @param {string} label
 * @param {Line[]} lines
 */
export function drawLines(into, label, lines) {
  const shown = lines.map((line) => ({ ...line, points: thinned(line.points.filter(([, y]) => Number.isFinite(y)), MOST_POINTS) }))
    .filter((line) => line.points.length);
  if (!shown.length) {
    into.replaceChildren(Object.assign(document.createElement("p"), { className: "note", textContent: "No step yet." }));
    return;
  }
  const all = shown.flatMap(({ points }) => points);
  const [x0, x1] = range(all.map(([x]) => x)), [y0, y1] = range(all.map(([, y]) => y));
  const atX = (/** @type {number} */ x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const atY = (/** @type {number} */ y) => TOP + ((y1 - y) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const last = shown.map(({ name, points }) => `${name} ${number(points[points.length - 1][1])}`).join(", ");
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label}: now ${last}` });
  for (const y of ticks(y0, y1)) {
    svg.append(make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: atY(y), y2: atY(y), class: "rule" }));
    svg.append(make("text", { x: LEFT - 6, y: atY(y) + 4, class: "tick end" }, number(y)));
  }
  for (const x of ticks(x0, x1)) svg.append(make("text", { x: atX(x), y: HEIGHT - 6, class: "tick middle" }, number(x)));
  for (const { className, points } of shown) {
    const path = points.map(([x, y]) => `${atX(x).toFixed(1)},${atY(y).toFixed(1)}`).join(" ");
    svg.append(make("polyline", { points: path, class: `curve ${className}` }));
    if (points.length === 1) svg.append(make("circle", { cx: atX(points[0][0]), cy: atY(points[0][1]), r: 3, class: className }));
  }
  const legend = document.createElement("p");
  legend.className = "legend";
  for (const { name, className, points } of shown) {
    const entry = document.createElement("span");
    entry.className = className;
    entry.textContent = `${name} ${number(points[points.length - 1][1])}`;
    legend.append(entry);
  }
  into.replaceChildren(svg, legend);
}

/**
 * @typedef {{sublayers: number, chunk: number, limit: string, predicted_s: number,
 *   tiles: {device: string, stage: number, sublayers: [number, number], rows: [number, number], leased: boolean}[]}} Tiling
 */

/**
 * Draw which device has which layers for which sequences.
 * @param {HTMLElement} into
 * @param {Tiling} plan
 */
export function drawTiling(into, plan) {
  const names = [...new Set(plan.tiles.map(({ device }) => device))];
  const described = plan.tiles.slice(0, 50).map(({ device, sublayers: [a, b] }) => `${device} ${number(a)} to ${number(b)}`);
  const svg = make("svg", { viewBox: "0 0 900 240", role: "img", "aria-label": `sublayers by device: ${described.join(", ")}` });
  for (const { device, sublayers: [a, b], rows: [c, d], leased } of plan.tiles) {
    const [x, w] = [(900 * a) / plan.sublayers, (900 * (b - a)) / plan.sublayers], [y, h] = [240 * c, 240 * (d - c)];
    const group = make("g", {});
    group.append(make("title", {}, `${device}: sublayers ${number(a)} to ${number(b)}, ${Math.round(100 * (d - c))}% of sequences${leased ? ", leased" : ""}`));
    group.append(make("rect", { x, y, width: w, height: h, class: `tile hue${names.indexOf(device) % 6}` }));
    const most = Math.floor(w / 9);
    if (h > 18 && most > 2) {
      const text = device.length > most ? `${device.slice(0, most - 1)}…` : device;
      group.append(make("text", { x: x + w / 2, y: y + h / 2 + 5, class: "middle label" }, text));
    }
    svg.append(group);
  }
  into.replaceChildren(svg);
}

/**
 * @param {string} name
 * @param {{[attribute: string]: string | number}} attributes
 * @param {string} [text]
 */
function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, String(value));
  if (text !== undefined) element.textContent = text;
  return element;
}

/** @param {number[]} values */
function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  return [low, high];
}

/**
 * Three to six round numbers within a range.
 * @param {number} low
 * @param {number} high
 */
export function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = /** @type {number} */ ([1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough));
  /** @type {number[]} */
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

/** @param {number} value */
export function number(value) {
  return value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}
