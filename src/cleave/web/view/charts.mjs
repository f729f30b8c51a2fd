// Pictures in SVG: lines over steps, the timeline of a step, and tilings.

import { thinned } from "./history.mjs";

const SVG = "http://www.w3.org/2000/svg";
const MOST_POINTS = 600;
const MOST_LANES = 40;
const LANE = 22;
const [HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [220, 52, 26, 10, 12];
/** @type {{[kind: string]: string}} */
const HUE_OF_KIND = { forward: "hue0", backward: "hue2", gradients: "hue1", weights: "hue4" };

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
  const width = widthOf(into), all = shown.flatMap(({ points }) => points);
  const [x0, x1] = range(all.map(([x]) => x)), [y0, y1] = range(all.map(([, y]) => y));
  const atX = (/** @type {number} */ x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const atY = (/** @type {number} */ y) => TOP + ((y1 - y) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const last = shown.map(({ name, points }) => `${name} ${number(points[points.length - 1][1])}`).join(", ");
  const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${label}: now ${last}` });
  for (const y of ticks(y0, y1)) {
    svg.append(make("line", { x1: LEFT, x2: width - RIGHT, y1: atY(y), y2: atY(y), class: "rule" }));
    svg.append(make("text", { x: LEFT - 6, y: atY(y) + 4, class: "tick end" }, number(y)));
  }
  for (const x of ticks(x0, x1).filter(Number.isInteger)) svg.append(make("text", { x: atX(x), y: HEIGHT - 6, class: "tick middle" }, number(x)));
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
 * @typedef {{across: string, down: string, note: string,
 *   tiles: {device: string, across: [number, number], down: [number, number], leased: boolean}[]}} Tiling
 */

/**
 * Draw which device has which part of a step or a product.
 * @param {HTMLElement} into
 * @param {Tiling} tiling
 */
export function drawTiling(into, { across, down, tiles }) {
  const [width, height] = [widthOf(into), 220], hueOf = hues(tiles.map(({ device }) => device));
  const described = tiles.slice(0, 50).map(({ device, across: x, down: y }) => `${device} ${percent(x)} by ${percent(y)}`);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${across} across, ${down} down: ${described.join("; ")}` });
  for (const { device, across: [a, b], down: [c, d], leased } of tiles) {
    const [x, w, y, h] = [width * a, width * (b - a), height * c, height * (d - c)], group = make("g", {});
    group.append(make("title", {}, `${device}: ${percent([a, b])} of ${across}, ${percent([c, d])} of ${down}${leased ? ", leased" : ""}`));
    group.append(make("rect", { x, y, width: w, height: h, class: `tile ${hueOf(device)}` }));
    const most = Math.floor(w / 9);
    if (h > 18 && most > 2) {
      const text = device.length > most ? `${device.slice(0, most - 1)}…` : device;
      group.append(make("text", { x: x + w / 2, y: y + h / 2 + 5, class: "middle label" }, text));
    }
    svg.append(group);
  }
  into.replaceChildren(svg);
}

/** @typedef {{seconds: number, is_cut: boolean, spans: [string, number, string, number, number][]}} Activity */

/**
 * Draw when each device computed which block of a step; every other round is paler.
 * @param {HTMLElement} into
 * @param {Activity} activity
 */
export function drawTimeline(into, { seconds, spans }) {
  const names = [...new Set(spans.map(([device]) => device))].sort().slice(0, MOST_LANES);
  const width = widthOf(into), left = Math.min(120, width / 4), height = names.length * LANE + BOTTOM;
  const atX = (/** @type {number} */ s) => left + (s / seconds) * (width - left - RIGHT);
  /** @type {Map<string, number>} */
  const busy = new Map();
  for (const [device, , , from, to] of spans) busy.set(device, (busy.get(device) ?? 0) + to - from);
  const described = names.map((name) => `${name} ${percent([0, Math.min(1, (busy.get(name) ?? 0) / seconds)])}`);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `share of the step in which devices computed: ${described.join(", ")}` });
  for (const x of ticks(0, seconds)) {
    svg.append(make("line", { x1: atX(x), x2: atX(x), y1: 0, y2: names.length * LANE, class: "rule" }));
    svg.append(make("text", { x: atX(x), y: height - 6, class: "tick middle" }, `${number(x)} s`));
  }
  const most = Math.floor(left / 8);
  for (const [lane, name] of names.entries()) {
    const label = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    svg.append(make("text", { x: left - 6, y: lane * LANE + 15, class: "tick end" }, label));
  }
  for (const [device, round, kind, from, to] of spans) {
    const lane = names.indexOf(device);
    if (lane < 0) continue;
    const bar = make("rect", { x: atX(from), y: lane * LANE + 3, width: Math.max(1, atX(to) - atX(from)), height: LANE - 6, class: `${HUE_OF_KIND[kind]}${round % 2 ? "" : " pale"}` });
    bar.append(make("title", {}, `${device}: ${kind}, round ${round}, ${number(from)} to ${number(to)} s`));
    svg.append(bar);
  }
  const kinds = [...new Set(spans.map(([, , kind]) => kind))], legend = document.createElement("p");
  legend.className = "legend";
  legend.append(...Object.keys(HUE_OF_KIND).filter((kind) => kinds.includes(kind)).map((kind) => {
    const entry = document.createElement("span");
    entry.className = `key ${HUE_OF_KIND[kind]}`;
    entry.textContent = kind;
    return entry;
  }));
  into.replaceChildren(svg, legend);
}

/** @param {HTMLElement} element  so that text in pictures is as large as elsewhere */
function widthOf(element) {
  return Math.max(240, element.clientWidth);
}

/** @param {[number, number]} range */
function percent([from, to]) {
  return `${Math.round(100 * (to - from))}%`;
}

/**
 * Give each name one of six colors, in the order in which names appear.
 * @param {string[]} names
 */
function hues(names) {
  const places = new Map([...new Set(names)].map((name, place) => [name, place % 6]));
  return (/** @type {string} */ name) => `hue${places.get(name)}`;
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
 * Two to seven round numbers within a range.
 * @param {number} low
 * @param {number} high
 */
export function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
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
