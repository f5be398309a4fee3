// Tools for drawing: elements, scales, marks, hover and keyboard, legend, axes. Text reaches the page as text only.
const story = JSON.parse(document.getElementById("story").textContent);
const state = { panel: 0, fusion: "main", run: Number(document.body.dataset.start), client: "all", hidden: {} };
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const percent = (value) => (100 * value).toFixed(1) + " %";
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(1);
const spread = (row) => (row.std === null || row.std === undefined ? "" : ` ± ${(100 * row.std).toFixed(1)}`);
const narrow = (canvas) => canvas.width < 560;
const colour = (index) => `var(--c${index % COLOURS})`;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const label = (x, y, text, attributes = {}) => shape("text", { x, y, ...attributes }, String(text));

// ---- scales ----
function ticksOf(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough) || power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(+(k * step).toPrecision(10));
  return ticks;
}
function linear(low, high, from, to, whole = false) {
  if (high <= low) high = low + 1;
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  return { at, low, high, ticks: ticksOf(low, high, Math.abs(to - from) / 44).filter((tick) => !whole || Number.isInteger(tick)), text: (value) => String(+value.toPrecision(6)) };
}
function logarithmic(low, high, from, to) {
  const first = Math.floor(Math.log10(low)), last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  const span = last - first;
  const at = (value) => from + ((Math.log10(Math.max(value, 10 ** first)) - first) / span) * (to - from);
  const every = Math.ceil(span / 8);
  const ticks = [];
  for (let k = first; k <= last; k += every) {
    ticks.push(10 ** k);
    if (span <= 2 && k < last) ticks.push(2 * 10 ** k, 5 * 10 ** k);
  }
  const text = (value) => (value >= 1e5 || value < 1e-3 ? value.toExponential(0) : String(+value.toPrecision(3)));
  return { at, low: 10 ** first, high: 10 ** last, ticks, text };
}

// ---- marks ----
const MARKS = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
  (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
  (r) => `M0,${1.2 * r}L${1.2 * r},${-r}H${-1.2 * r}z`,
  (r) => `M${-r},${-r / 3}h${(2 * r) / 3}v${(-2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(-2 * r) / 3}h${(-2 * r) / 3}z`,
];
function mark(index, x, y, radius, attributes) {
  return shape("path", { d: MARKS[index % MARKS.length](radius), transform: `translate(${x},${y})`, ...attributes });
}

// ---- hover and keyboard ----
const tip = byId("tip");
let tipped = null;
addEventListener("scroll", () => tipped && tipped.plot.chart && placeTip(tipped.plot, tipped.point), { passive: true, capture: true });
addEventListener("pointerdown", (event) => tipped && !tipped.plot.contains(event.target) && hideTip(tipped.plot));
function showTip(plot, point) {
  if (tipped && tipped.plot !== plot) hideTip(tipped.plot);
  tipped = { plot, point };
  tip.replaceChildren(make("b", {}, point.title), point.text);
  tip.hidden = false;
  placeTip(plot, point);
  plot.chart.halo.setAttribute("transform", `translate(${point.x},${point.y})`);
  plot.chart.halo.setAttribute("visibility", "visible");
}
function placeTip(plot, point) {
  const box = plot.querySelector("svg").getBoundingClientRect();
  const ratio = box.width / plot.chart.width;
  const x = box.left + point.x * ratio, y = box.top + point.y * ratio;
  const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = y - tip.offsetHeight - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 4 ? y + 16 : above}px`;
}
function hideTip(plot) {
  if (!tipped || tipped.plot === plot) [tip.hidden, tipped] = [true, null];
  if (plot.chart) plot.chart.halo.setAttribute("visibility", "hidden");
}
function nearest(plot, event) {
  const box = plot.querySelector("svg").getBoundingClientRect();
  const ratio = plot.chart.width / box.width;
  const x = (event.clientX - box.left) * ratio, y = (event.clientY - box.top) * ratio;
  let best = -1, distance = plot.chart.reach;
  plot.chart.points.forEach((point, index) => {
    const d = Math.hypot(point.x - x, point.y - y);
    if (d < distance) [best, distance] = [index, d];
  });
  return best;
}
function listen(plot) {
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  const over = (event) => {
    if (!plot.chart) return;
    const index = nearest(plot, event);
    if (index < 0) return hideTip(plot);
    plot.chart.current = index;
    showTip(plot, plot.chart.points[index]);
  };
  plot.addEventListener("pointermove", over);
  plot.addEventListener("pointerdown", over);
  // A finger that is lifted leaves the plot too: what it touched stays until the next touch elsewhere.
  plot.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hideTip(plot));
  plot.addEventListener("blur", () => hideTip(plot));
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!plot.chart || !plot.chart.points.length) return;
    const count = plot.chart.points.length;
    if (event.key === "Escape") return hideTip(plot);
    if (event.key === "Home") plot.chart.current = 0;
    else if (event.key === "End") plot.chart.current = count - 1;
    else if (event.key in moves) plot.chart.current = (plot.chart.current + moves[event.key] + count) % count;
    else return;
    event.preventDefault();
    showTip(plot, plot.chart.points[plot.chart.current]);
  });
}

// ---- one figure: legend, drawing, values ----
const figures = {};
function figure(id, build) {
  const host = byId(id);
  if (!host) return;
  listen(host.querySelector(".plot"));
  const details = host.querySelector("details.values");
  details.addEventListener("toggle", () => fillValues(host));
  figures[id] = () => draw(host, id, build);
}
const redraw = (ids) => ids.forEach((id) => figures[id] && figures[id]());
function fillValues(host) {
  const details = host.querySelector("details.values"), plot = host.querySelector(".plot");
  if (!details.open) return;
  const rows = (plot.chart ? plot.chart.points : []).slice(0, 2000).map((point) =>
    make("tr", {}, make("th", { scope: "row" }, point.title), make("td", {}, point.text)));
  details.querySelector("div").replaceChildren(make("table", {}, make("tbody", {}, ...rows)));
}
function draw(host, id, build) {
  const plot = host.querySelector(".plot"), legend = host.querySelector(".legend");
  const hidden = (state.hidden[id] = state.hidden[id] || new Set());
  const width = Math.max(260, Math.round(host.clientWidth));
  const canvas = { width, hidden, points: [], nodes: [], reach: 40, height: 320, keys: [], about: "", shown: "" };
  const empty = build(canvas);
  host.querySelector(".shown").textContent = canvas.shown;
  hideTip(plot);
  host.classList.toggle("without", Boolean(empty));
  const keep = document.activeElement && legend.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  legend.replaceChildren(...(empty ? [] : canvas.keys.map((key) => legendButton(key, hidden, id))));
  if (keep !== null) legend.querySelectorAll("button").forEach((button) => button.dataset.key === keep && button.focus());
  plot.setAttribute("aria-label", empty ? "nothing to draw" : `${canvas.about}. Arrow keys read out the values.`);
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", "Show or hide");
  if (empty) {
    plot.chart = null;
    plot.replaceChildren(make("p", { class: "empty" }, empty));
    return;
  }
  const halo = shape("circle", { r: 8, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${canvas.height}`, role: "img", "aria-label": canvas.about });
  drawing.append(...canvas.nodes, halo);
  plot.replaceChildren(drawing);
  plot.chart = { points: canvas.points, width, halo, reach: canvas.reach, current: -1 };
  fillValues(host);
}
function legendButton(key, hidden, id) {
  const swatch = shape("svg", { width: 22, height: 14, "aria-hidden": "true" });
  if (key.line !== false) {
    swatch.append(shape("line", { x1: 0, x2: 22, y1: 7, y2: 7, stroke: key.colour, "stroke-width": 2, "stroke-dasharray": key.dash || "none" }));
  }
  if (key.mark !== undefined) swatch.append(mark(key.mark, 11, 7, 4, { fill: key.hollow ? "none" : key.colour, stroke: key.colour, "stroke-width": 1.5 }));
  const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(key.name)), "data-key": key.name }, swatch, key.name);
  button.addEventListener("click", () => {
    if (!hidden.delete(key.name)) hidden.add(key.name);
    figures[id]();
  });
  return button;
}

// ---- axes ----
function axes(canvas, x, y, area, names) {
  const { nodes } = canvas;
  for (const tick of y.ticks) {
    nodes.push(shape("line", { class: "grid", x1: area.left, x2: area.right, y1: y.at(tick), y2: y.at(tick) }));
    nodes.push(label(area.left - 7, y.at(tick) + 4, y.text(tick), { "text-anchor": "end", class: "faint" }));
  }
  for (const tick of x.ticks) nodes.push(label(x.at(tick), area.bottom + 18, x.text(tick), { "text-anchor": "middle", class: "faint" }));
  nodes.push(shape("line", { class: "grid", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  if (names.x) nodes.push(label((area.left + area.right) / 2, area.bottom + 36, names.x, { "text-anchor": "middle", class: "faint" }));
  if (names.y) nodes.push(label(area.left - 7, area.top - 12, names.y, { class: "faint", "text-anchor": "start", dx: 7 - area.left }));
}
function line(xs, ys, attributes) {
  let path = "", pen = "M";
  xs.forEach((x, k) => {
    if (ys[k] === null || ys[k] === undefined) pen = "M";
    else { path += `${pen}${x.toFixed(1)},${ys[k].toFixed(1)}`; pen = "L"; }
  });
  return shape("path", { d: path, fill: "none", "stroke-width": 2, "stroke-linejoin": "round", ...attributes });
}
function errorBar(nodes, x1, y1, x2, y2, stroke, cap = 4) {
  nodes.push(shape("line", { x1, y1, x2, y2, stroke, "stroke-width": 2 }));
  for (const [x, y] of [[x1, y1], [x2, y2]]) {
    const [dx, dy] = x1 === x2 ? [cap, 0] : [0, cap];
    nodes.push(shape("line", { x1: x - dx, x2: x + dx, y1: y - dy, y2: y + dy, stroke, "stroke-width": 2 }));
  }
}
function around(values, margin = 0.08) {
  const low = Math.min(...values), high = Math.max(...values), pad = Math.max((high - low) * margin, 0.01);
  return [Math.max(0, low - pad), Math.min(1, high + pad)];
}
// Names at the right ends of curves, moved apart where they would touch.
function endLabels(canvas, area, ends) {
  const step = 14, sorted = [...ends].sort((a, b) => a.y - b.y);
  let last = -Infinity;
  for (const end of sorted) end.at = last = Math.max(end.y, last + step);
  let limit = area.bottom + 6;
  for (const end of sorted.reverse()) { end.at = Math.min(end.at, limit); limit = end.at - step; }
  for (const end of sorted) {
    if (Math.abs(end.at - end.y) > 3) canvas.nodes.push(shape("path", { d: `M${area.right + 5},${end.y}L${area.right + 13},${end.at}`, stroke: end.colour, fill: "none", "stroke-opacity": 0.6 }));
    canvas.nodes.push(label(area.right + 16, end.at + 4, shorten(end.name, Math.floor((canvas.width - area.right - 16) / 6.4)), { class: "end", style: `fill:${end.colour}` }));
  }
}
const endRoom = (canvas, names) => (narrow(canvas) || names.length > 10 ? 14 : Math.min(canvas.width * 0.34, 22 + Math.max(...names.map(textWidth))));

// Text on a coloured cell: black or white, whichever can be read, in the light and in the dark scheme.
const TINTS = {
  light: { ground: "#ffffff", fill: "#0067a8", positive: "#c14a00", negative: "#0067a8" },
  dark: { ground: "#14171b", fill: "#62b5f0", positive: "#ff9457", negative: "#62b5f0" },
};
const channels = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16) / 255);
function bright(scheme, tint, strength) {
  const ground = channels(TINTS[scheme].ground), over = channels(TINTS[scheme][tint]);
  const [r, g, b] = ground.map((value, k) => value + strength * (over[k] - value)).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179;
}
const cellInk = (tint, strength) => `var(--t${bright("light", tint, strength) ? 0 : 1}${bright("dark", tint, strength) ? 1 : 0})`;
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const textWidth = (text) => 7 * String(text).length;

// A table of numbers as coloured cells, with the names of rows and columns.
function heatmap(canvas, rows, columns, value, paint, words, area, edge) {
  const wide = (area.right - area.left) / columns.length, high = (area.bottom - area.top) / rows.length;
  canvas.reach = Math.max(wide, high) * 0.75;
  rows.forEach((row, r) => {
    const y = area.top + r * high;
    if (high >= 11 || r % Math.ceil(11 / high) === 0) canvas.nodes.push(label(area.left - 7, y + high / 2 + 4, shorten(row.name, row.room || 12), { "text-anchor": "end", class: row.strong === false ? "faint" : "" }));
    columns.forEach((column, c) => {
      const number = value(r, c), x = area.left + c * wide, [tint, strength] = paint(number, r, c);
      if (strength > 0) canvas.nodes.push(shape("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(0.5, wide - 1), height: Math.max(0.5, high - 1), fill: `var(--${tint})`, "fill-opacity": strength.toFixed(3) }));
      const text = words(number);
      if (text && wide >= edge && high >= 14) {
        canvas.nodes.push(label(x + wide / 2, y + high / 2 + 4, text, { "text-anchor": "middle", class: "cell", style: `fill:${cellInk(tint, strength)}` }));
      }
      canvas.points.push({ x: x + wide / 2, y: y + high / 2, title: `${row.title}, ${column.title}`, text: row.say(number) });
    });
  });
  const longest = Math.max(...columns.map((column) => column.name.length));
  const tilt = textWidth("x".repeat(longest)) > wide;
  const every = tilt ? Math.ceil(13 / wide) : 1;
  columns.forEach((column, c) => {
    if (c % every) return;
    const x = area.left + (c + 0.5) * wide, y = area.bottom + 16;
    canvas.nodes.push(label(x, y, shorten(column.name, 12), { class: "faint", ...(tilt && longest > 2 ? { "text-anchor": "end", transform: `rotate(-45 ${x} ${y})` } : { "text-anchor": "middle" }) }));
  });
}
