"use strict";
// Draws the figures of the page from the JSON beside it. No library, no network. Text reaches the page as text only.
(() => {
  const story = JSON.parse(document.getElementById("story").textContent);
  const state = { panel: 0, fusion: "main", run: Number(document.body.dataset.start), client: "all", hidden: {} };
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 8;
  const percent = (value) => (100 * value).toFixed(1) + " %";
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
  function linear(low, high, from, to) {
    if (high <= low) high = low + 1;
    const at = (value) => from + ((value - low) / (high - low)) * (to - from);
    return { at, low, high, ticks: ticksOf(low, high, Math.abs(to - from) / 44), text: (value) => String(+value.toPrecision(6)) };
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
  function showTip(plot, point) {
    const box = plot.querySelector("svg").getBoundingClientRect();
    const ratio = box.width / plot.chart.width;
    tip.replaceChildren(make("b", {}, point.title), point.text);
    tip.hidden = false;
    const x = box.left + point.x * ratio, y = box.top + point.y * ratio;
    const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = y - tip.offsetHeight - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 4 ? y + 16 : above}px`;
    plot.chart.halo.setAttribute("transform", `translate(${point.x},${point.y})`);
    plot.chart.halo.setAttribute("visibility", "visible");
  }
  function hideTip(plot) {
    tip.hidden = true;
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
    const over = (event) => {
      if (!plot.chart) return;
      const index = nearest(plot, event);
      if (index < 0) return hideTip(plot);
      plot.chart.current = index;
      showTip(plot, plot.chart.points[index]);
    };
    plot.addEventListener("pointermove", over);
    plot.addEventListener("pointerdown", over);
    plot.addEventListener("pointerleave", () => hideTip(plot));
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
  function errorBar(nodes, x1, y1, x2, y2, stroke) {
    nodes.push(shape("line", { x1, y1, x2, y2, stroke, "stroke-width": 2 }));
    for (const [x, y] of [[x1, y1], [x2, y2]]) {
      const [dx, dy] = x1 === x2 ? [4, 0] : [0, 4];
      nodes.push(shape("line", { x1: x - dx, x2: x + dx, y1: y - dy, y2: y + dy, stroke, "stroke-width": 2 }));
    }
  }
  function around(values, margin = 0.08) {
    const low = Math.min(...values), high = Math.max(...values), pad = Math.max((high - low) * margin, 0.01);
    return [Math.max(0, low - pad), Math.min(1, high + pad)];
  }
  const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const textWidth = (text) => 7 * String(text).length;

  // ---- the figures ----
  const labels = [...new Set(story.panels.flatMap((panel) => panel.rows.map((row) => row.label)))];
  const fusionNames = [...new Set(story.panels.flatMap((panel) => panel.rows.map((row) => row.fusion)))];
  const everyFusion = [...new Set([...fusionNames, ...story.runs.flatMap((run) => Object.keys(run.fusions))])];
  const fusionIndex = (name) => everyFusion.indexOf(name);
  const single = story.kind === "run";
  const chosen = (entries) => entries.filter((entry) => (single ? true : state.fusion === "main" ? entry.main : entry.fusion === state.fusion));
  const nameOf = (entry) => (single ? entry.fusion : entry.label);
  const indexOf = (entry) => (single ? fusionIndex(entry.fusion) : labels.indexOf(entry.label));
  const fusionWords = () => (single ? "" : state.fusion === "main" ? (story.kind === "study" ? "each under the fusion its claims are tested with" : "each method under its own fusion") : `all fused by ${state.fusion}`);

  figure("fig-comparison", (canvas) => {
    const panel = story.panels[state.panel];
    const rows = chosen(panel.rows);
    canvas.shown = [story.panels.length > 1 ? panel.title : "", fusionWords()].filter(Boolean).join("; ");
    canvas.about = `Test accuracy of ${rows.map(nameOf).join(", ")}`;
    if (!rows.length) return "No method has this fusion.";
    const seeds = rows.some((row) => row.accuracies.length > 1);
    canvas.keys = rows.map((row) => ({ name: nameOf(row), colour: colour(indexOf(row)), mark: indexOf(row), line: false }));
    if (seeds) canvas.keys.push({ name: "single seeds", colour: "var(--soft)", mark: 0, hollow: true, line: false });
    const visible = rows.filter((row) => !canvas.hidden.has(nameOf(row)));
    const left = Math.min(canvas.width * 0.36, 16 + Math.max(...rows.map((row) => textWidth(nameOf(row)))));
    canvas.height = 56 + 38 * Math.max(1, visible.length);
    const area = { left, right: canvas.width - 62, top: 8, bottom: canvas.height - 46 };
    const values = rows.flatMap((row) => [...row.accuracies, row.low, row.high]).filter((value) => value !== null);
    const [low, high] = around(values);
    const x = linear(100 * low, 100 * high, area.left, area.right);
    for (const tick of x.ticks) {
      canvas.nodes.push(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }));
      canvas.nodes.push(label(x.at(tick), area.bottom + 18, x.text(tick), { "text-anchor": "middle", class: "faint" }));
    }
    canvas.nodes.push(label((area.left + area.right) / 2, area.bottom + 38, "test accuracy %", { "text-anchor": "middle", class: "faint" }));
    visible.forEach((row, k) => {
      const y = area.top + 38 * (k + 0.5), stroke = colour(indexOf(row));
      const name = shorten(nameOf(row), Math.floor((left - 12) / 6.6));
      canvas.nodes.push(label(left - 12, y + 4, name, { "text-anchor": "end" }));
      const at = x.at(100 * row.mean);
      if (row.low !== null) errorBar(canvas.nodes, x.at(100 * Math.max(0, row.low)), y, x.at(100 * Math.min(1, row.high)), y, stroke);
      if (seeds && !canvas.hidden.has("single seeds")) row.accuracies.forEach((value, seed) => {
        canvas.nodes.push(shape("circle", { cx: x.at(100 * value), cy: y + 10, r: 3, fill: "none", stroke, "stroke-width": 1.3 }));
        canvas.points.push({ x: x.at(100 * value), y: y + 10, title: `${nameOf(row)}, seed ${row.seeds[seed]}`, text: percent(value) });
      });
      canvas.nodes.push(mark(indexOf(row), at, y, 5.5, { fill: stroke }));
      canvas.nodes.push(label(area.right + 10, y + 4, (100 * row.mean).toFixed(1)));
      const spread = row.std === null ? "" : ` ± ${(100 * row.std).toFixed(1)}`;
      const gap = row.gap ? `; ${(100 * row.gap.mean).toFixed(1)} points to ${row.gap.against}` : "";
      canvas.points.push({ x: at, y, title: single ? row.fusion : `${row.label}, ${row.fusion}`, text: (100 * row.mean).toFixed(1) + spread + " %" + gap });
    });
  });

  figure("fig-settings", (canvas) => {
    const panels = story.panels;
    const names = panels.map((panel) => panel.title);
    canvas.keys = labels.map((name, k) => ({ name, colour: colour(k), mark: k }));
    canvas.about = `Accuracy of ${labels.join(", ")} over ${names.join("; ")}`;
    const rows = panels.flatMap((panel, p) => panel.rows.filter((row) => row.main).map((row) => ({ ...row, p })));
    const slot = (canvas.width - 64) / panels.length;
    const most = Math.max(6, Math.floor(slot / 6.5)), tilt = Math.max(...names.map((name) => name.length)) > most;
    canvas.height = 330 + (tilt ? 60 : 0);
    const area = { left: 44, right: canvas.width - 20, top: 26, bottom: 270 };
    const [low, high] = around(rows.flatMap((row) => [row.mean - (row.std || 0), row.mean + (row.std || 0)]));
    const y = linear(100 * low, 100 * high, area.bottom, area.top);
    axes(canvas, { ticks: [] }, y, area, { y: "test accuracy %" });
    const at = (p, k) => area.left + slot * (p + 0.5) + (k - (labels.length - 1) / 2) * Math.min(9, (slot * 0.6) / labels.length);
    names.forEach((name, p) => {
      const x = area.left + slot * (p + 0.5);
      const rotate = tilt ? { transform: `rotate(-32 ${x} ${area.bottom + 18})`, "text-anchor": "end" } : { "text-anchor": "middle" };
      canvas.nodes.push(label(x, area.bottom + 18, shorten(name, 22), { class: "faint", ...rotate }));
    });
    labels.forEach((name, k) => {
      if (canvas.hidden.has(name)) return;
      const mine = rows.filter((row) => row.label === name);
      canvas.nodes.push(line(mine.map((row) => at(row.p, k)), mine.map((row) => y.at(100 * row.mean)), { stroke: colour(k), "stroke-opacity": 0.45, "stroke-width": 1.5 }));
      for (const row of mine) {
        const x = at(row.p, k);
        if (row.std !== null) errorBar(canvas.nodes, x, y.at(100 * (row.mean - row.std)), x, y.at(100 * (row.mean + row.std)), colour(k));
        canvas.nodes.push(mark(k, x, y.at(100 * row.mean), 4.5, { fill: colour(k) }));
        const spread = row.std === null ? "" : ` ± ${(100 * row.std).toFixed(1)}`;
        canvas.points.push({ x, y: y.at(100 * row.mean), title: `${name}, ${names[row.p]}`, text: `${(100 * row.mean).toFixed(1)}${spread} %` });
      }
    });
  });

  (story.sweeps || []).forEach((sweep, number) => figure(`fig-sweep-${number}`, (canvas) => {
    canvas.about = sweep.title;
    canvas.keys = sweep.series.map((row, k) => ({ name: row.name, colour: colour(k), mark: k }));
    canvas.height = 310;
    const area = { left: 44, right: canvas.width - 18, top: 28, bottom: 262 };
    const values = sweep.series.flatMap((row) => row.mean.flatMap((mean, i) => [mean - (row.std[i] || 0), mean + (row.std[i] || 0)]));
    if (sweep.level) values.push(sweep.level.mean);
    const [low, high] = around(values), xs = [...new Set(sweep.series.flatMap((row) => row.x))].sort((a, b) => a - b);
    const y = linear(100 * low, 100 * high, area.bottom, area.top);
    const scale = linear(Math.log(xs[0]), Math.log(xs[xs.length - 1]), area.left + 14, area.right - 14);
    const x = { at: (value) => scale.at(Math.log(value)), ticks: xs, text: String };
    axes(canvas, x, y, area, { x: sweep.axis, y: "test accuracy %" });
    if (sweep.level) {
      const at = y.at(100 * sweep.level.mean);
      canvas.nodes.push(shape("line", { x1: area.left, x2: area.right, y1: at, y2: at, stroke: "var(--ink)", "stroke-dasharray": "2 4" }), label(area.right, at - 5, sweep.level.name, { "text-anchor": "end" }));
    }
    sweep.series.forEach((row, k) => {
      if (canvas.hidden.has(row.name)) return;
      const shift = (k - (sweep.series.length - 1) / 2) * 4, at = row.x.map((value) => x.at(value) + shift);
      canvas.nodes.push(line(at, row.mean.map((mean) => y.at(100 * mean)), { stroke: colour(k) }));
      row.mean.forEach((mean, i) => {
        if (row.std[i] !== null) errorBar(canvas.nodes, at[i], y.at(100 * (mean - row.std[i])), at[i], y.at(100 * (mean + row.std[i])), colour(k));
        canvas.nodes.push(mark(k, at[i], y.at(100 * mean), 4.5, { fill: colour(k) }));
        canvas.points.push({ x: at[i], y: y.at(100 * mean), title: `${row.name}, ${sweep.axis} ${row.x[i]}`, text: `${(100 * mean).toFixed(1)}${row.std[i] === null ? "" : ` ± ${(100 * row.std[i]).toFixed(1)}`} %` });
      });
    });
  }));

  figure("fig-checkpoints", (canvas) => {
    const panel = story.panels[state.panel];
    const curves = chosen(panel.curves);
    canvas.shown = [story.panels.length > 1 ? panel.title : "", fusionWords()].filter(Boolean).join("; ");
    if (!curves.some((curve) => curve.epochs.length > 1)) return "No checkpoints were kept (train.snapshots is 0).";
    canvas.about = `Accuracy over epochs of ${curves.map(nameOf).join(", ")}`;
    canvas.keys = curves.map((curve) => ({ name: nameOf(curve), colour: colour(indexOf(curve)), mark: indexOf(curve) }));
    const area = { left: 40, right: canvas.width - 14, top: 28, bottom: 272 };
    canvas.height = 320;
    const [low, high] = around(curves.flatMap((curve) => [...curve.low, ...curve.high]));
    const y = linear(100 * low, 100 * high, area.bottom, area.top);
    const last = Math.max(...curves.flatMap((curve) => curve.epochs));
    const x = linear(0, last, area.left, area.right);
    axes(canvas, x, y, area, { x: "epoch at which fusion is simulated", y: "test accuracy %" });
    for (const curve of curves) {
      if (canvas.hidden.has(nameOf(curve))) continue;
      const k = indexOf(curve), xs = curve.epochs.map(x.at), ys = curve.mean.map((value) => y.at(100 * value));
      const shift = (k - (labels.length - 1) / 2) * 3;
      if (!single) curve.low.forEach((value, i) => value !== curve.high[i] && canvas.nodes.push(shape("line", { x1: xs[i] + shift, x2: xs[i] + shift, y1: y.at(100 * value), y2: y.at(100 * curve.high[i]), stroke: colour(k), "stroke-opacity": 0.55, "stroke-width": 1.5 })));
      canvas.nodes.push(line(xs, ys, { stroke: colour(k) }));
      curve.epochs.forEach((epoch, i) => {
        canvas.nodes.push(mark(k, xs[i], ys[i], i === curve.epochs.length - 1 ? 5 : 3.5, { fill: colour(k) }));
        canvas.points.push({ x: xs[i], y: ys[i], title: `${nameOf(curve)}, epoch ${epoch}`, text: percent(curve.mean[i]) + (single || curve.low[i] === curve.high[i] ? "" : ` (seeds ${(100 * curve.low[i]).toFixed(1)} to ${(100 * curve.high[i]).toFixed(1)})`) });
      });
    }
  });

  const current = () => story.runs[state.run];
  const runWords = () => (story.runs.length > 1 ? current().label : "");

  function heatmap(canvas, rows, columns, value, paint, words, area, edge) {
    const wide = (area.right - area.left) / columns.length, high = (area.bottom - area.top) / rows.length;
    canvas.reach = Math.max(wide, high) * 0.75;
    rows.forEach((row, r) => {
      const y = area.top + r * high;
      if (high >= 11 || r % Math.ceil(11 / high) === 0) canvas.nodes.push(label(area.left - 7, y + high / 2 + 4, shorten(row.name, 12), { "text-anchor": "end", class: row.strong === false ? "faint" : "" }));
      columns.forEach((column, c) => {
        const number = value(r, c), x = area.left + c * wide, [fill, strength] = paint(number, r, c);
        if (strength > 0) canvas.nodes.push(shape("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(0.5, wide - 1), height: Math.max(0.5, high - 1), fill, "fill-opacity": strength.toFixed(3) }));
        const text = words(number);
        if (text && wide >= edge && high >= 14) {
          canvas.nodes.push(label(x + wide / 2, y + high / 2 + 4, text, { "text-anchor": "middle", class: "cell", ...(strength > 0.55 ? { style: "fill:var(--on-fill)" } : {}) }));
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

  figure("fig-clients", (canvas) => {
    const run = current(), peak = Math.max(1, ...run.table.flat());
    const shownRows = run.table.length < run.clients ? `first ${run.table.length} of ${run.clients} clients` : "";
    canvas.shown = [runWords(), shownRows].filter(Boolean).join("; ");
    canvas.about = `Training images of ${run.table.length} clients by class`;
    const high = Math.max(6, Math.min(28, 1400 / run.table.length));
    const foot = Math.max(...run.classes.map((name) => name.length)) > 3 ? 78 : 34;
    canvas.height = 8 + high * run.table.length + foot;
    const area = { left: 70, right: canvas.width - 4, top: 8, bottom: canvas.height - foot };
    const rows = run.table.map((counts, client) => ({
      name: `client ${client}`, title: `client ${client}`, say: (n) => `${n} image${n === 1 ? "" : "s"}`,
      strong: state.client === "all" || state.client === client,
    }));
    const columns = run.classes.map((name) => ({ name, title: `class ${name}` }));
    const faded = (r) => (state.client === "all" || state.client === r ? 1 : 0.35);
    heatmap(canvas, rows, columns, (r, c) => run.table[r][c], (n, r) => ["var(--fill)", n ? faded(r) * (0.08 + 0.92 * Math.sqrt(n / peak)) : 0], (n) => (n ? String(n) : ""), area, 24);
  });

  // Raw (dashed) and effective (solid) lambda of several curves on a logarithmic axis.
  function drawLambda(canvas, curves, bound) {
    const many = curves.length > 12;
    if (!many) canvas.keys = curves.map((row) => ({ name: row.name, colour: colour(row.index), mark: row.index }));
    canvas.keys.push({ name: "effective", colour: "var(--ink)" }, { name: "raw", colour: "var(--ink)", dash: "5 4" });
    const kinds = ["effective", "raw"].filter((kind) => !canvas.hidden.has(kind));
    const all = curves.flatMap((row) => [...row.raw, ...row.effective]).concat(bound || []).filter((value) => value > 0);
    const top = Math.max(...all), floor = Math.max(Math.min(...all), top * 1e-5);
    const area = { left: 52, right: canvas.width - 14, top: 28, bottom: 292 };
    canvas.height = 340;
    const y = logarithmic(floor, top * 1.05, area.bottom, area.top);
    const epochs = curves.flatMap((row) => row.epochs);
    const x = linear(Math.min(...epochs), Math.max(...epochs), area.left, area.right);
    axes(canvas, x, y, area, { x: "epoch", y: "lambda" });
    if (bound) {
      canvas.nodes.push(shape("line", { class: "valve", x1: area.left, x2: area.right, y1: y.at(bound), y2: y.at(bound), stroke: "var(--ink)", "stroke-width": 1.2, "stroke-dasharray": "2 3" }));
      canvas.nodes.push(label(area.right, y.at(bound) - 5, `valve ${bound}`, { "text-anchor": "end" }));
    }
    for (const row of curves) {
      if (canvas.hidden.has(row.name)) continue;
      const xs = row.epochs.map(x.at);
      for (const kind of kinds) {
        const ys = row[kind].map((value) => (value === null ? null : y.at(Math.max(value, y.low))));
        canvas.nodes.push(line(xs, ys, { stroke: colour(row.index), "stroke-dasharray": kind === "raw" ? "5 4" : "none", "stroke-width": kind === "raw" ? 1.4 : 2, "stroke-opacity": many ? 0.5 : 1 }));
        const every = Math.ceil(xs.length / 8);
        if (!many && kind === "effective") xs.forEach((at, i) => i % every === 0 && ys[i] !== null && canvas.nodes.push(mark(row.index, at, ys[i], 3.5, { fill: colour(row.index) })));
        row.epochs.forEach((epoch, i) => ys[i] !== null && canvas.points.push({ x: xs[i], y: ys[i], title: `${row.name}, epoch ${epoch}`, text: `${kind} lambda ${row[kind][i]}` }));
      }
    }
  }

  figure("fig-lambdas", (canvas) => {
    const panel = story.panels[state.panel];
    canvas.shown = story.panels.length > 1 ? panel.title : "";
    if (!panel.lambdas.length) return "No method is aligned here: lambda is 0 throughout.";
    canvas.about = `Lambda over epochs of ${panel.lambdas.map((row) => row.label).join(", ")}`;
    drawLambda(canvas, panel.lambdas.map((row) => ({ ...row, name: row.label, index: labels.indexOf(row.label) })), null);
  });

  figure("fig-lambda", (canvas) => {
    const run = current();
    canvas.shown = runWords();
    if (!run.lambda) return `${run.method} has no alignment: lambda is 0 throughout.`;
    const { clients, bound, of } = run.lambda;
    const curves = clients.map((row, index) => ({ ...row, index, name: `client ${row.client}` })).filter((row) => state.client === "all" || row.client === state.client);
    if (!curves.length) return `Client ${state.client} is not among the ${clients.length} of ${of} clients whose curves are in this file.`;
    canvas.shown = [runWords(), curves.length < of ? `${curves.length} of ${of} clients` : ""].filter(Boolean).join("; ");
    canvas.about = `Lambda over epochs of ${curves.length} clients${bound ? `, valve at ${bound}` : ""}`;
    drawLambda(canvas, curves, bound);
  });

  const clientPosition = (geometry) => (state.client === "all" ? -1 : geometry.clients.indexOf(state.client));
  const noGeometry = "No prototypes: the uploads of this run hold none or are no longer there.";

  figure("fig-cosines", (canvas) => {
    const run = current(), geometry = run.geometry;
    canvas.shown = "";
    if (!geometry) return noGeometry;
    const position = clientPosition(geometry);
    const own = position >= 0 && geometry.client_cosines;
    const matrix = own ? geometry.client_cosines[position] : geometry.cosines;
    canvas.shown = [runWords(), own ? `client ${state.client}` : `all clients, ${geometry.rule}`].filter(Boolean).join("; ");
    canvas.about = `Cosines between ${run.classes.length} class prototypes`;
    const names = run.classes.map((name) => ({ name, title: name, say: (value) => `cosine ${value.toFixed(3)}` }));
    const long = Math.max(...run.classes.map((name) => name.length)) > 3;
    const left = long ? 84 : 30, foot = long ? 78 : 26;
    const side = Math.min(canvas.width - left - 4, 420);
    canvas.height = side + foot + 34;
    const area = { left, right: left + side, top: 8, bottom: 8 + side };
    heatmap(canvas, names, names, (r, c) => matrix[r][c], (value) => [value >= 0 ? "var(--positive)" : "var(--negative)", Math.min(1, Math.abs(value))],
      (value) => value.toFixed(2).replace("0.", ".").replace("1.00", "1"), area, 30);
    const y = canvas.height - 14, steps = 21;
    for (let k = 0; k < steps; k++) {
      const value = -1 + (2 * k) / (steps - 1);
      canvas.nodes.push(shape("rect", { x: left + 22 + k * 7, y: y - 9, width: 7, height: 10, fill: value >= 0 ? "var(--positive)" : "var(--negative)", "fill-opacity": Math.abs(value) }));
    }
    canvas.nodes.push(label(left + 16, y, "-1", { "text-anchor": "end", class: "faint" }), label(left + 28 + 7 * steps, y, "1", { class: "faint" }));
  });

  figure("fig-map", (canvas) => {
    const run = current(), geometry = run.geometry;
    canvas.shown = "";
    if (!geometry) return noGeometry;
    const kept = geometry.kept.reduce((sum, value) => sum + value, 0);
    const position = clientPosition(geometry);
    const members = geometry.clients.map((client, k) => k).filter((k) => position < 0 || k === position);
    canvas.shown = [runWords(), `keeps ${(100 * kept).toFixed(0)} % of the variance`, geometry.clients.length < geometry.of ? `${geometry.clients.length} of ${geometry.of} clients` : ""].filter(Boolean).join("; ");
    canvas.about = `Prototypes of ${run.classes.length} classes and ${members.length} clients on a plane`;
    byId("least").textContent = geometry.least;
    const GROUPS = { fused: "fused", client: "client", unsure: "client, hardly saw it", anchor: "anchor" };
    canvas.keys = [
      { name: GROUPS.fused, colour: "var(--ink)", mark: 1, line: false }, { name: GROUPS.client, colour: "var(--ink)", mark: 0, line: false },
      ...(geometry.counts ? [{ name: GROUPS.unsure, colour: "var(--ink)", mark: 0, hollow: true, line: false }] : []),
      ...(geometry.anchors ? [{ name: GROUPS.anchor, colour: "var(--soft)", mark: 5, line: false }] : []),
    ];
    const everything = [...geometry.server, ...members.flatMap((k) => geometry.points[k]), ...(geometry.anchors || [])];
    const xs = everything.map((point) => point[0]), ys = everything.map((point) => point[1]);
    const side = Math.min(canvas.width - 16, 470);
    canvas.height = side;
    canvas.reach = 24;
    const span = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), 1e-6) * 1.12;
    const centre = [(Math.max(...xs) + Math.min(...xs)) / 2, (Math.max(...ys) + Math.min(...ys)) / 2];
    const x = (value) => 8 + side * (0.5 + (value - centre[0]) / span), y = (value) => side * (0.5 - (value - centre[1]) / span);
    canvas.nodes.push(shape("rect", { class: "grid", x: 8.5, y: 0.5, width: side - 1, height: side - 1, fill: "none" }));
    const shown = (group) => !canvas.hidden.has(group);
    run.classes.forEach((name, c) => {
      const hue = colour(c);
      const [sx, sy] = [x(geometry.server[c][0]), y(geometry.server[c][1])];
      if (geometry.anchors && shown(GROUPS.anchor)) {
        const [ax, ay] = [x(geometry.anchors[c][0]), y(geometry.anchors[c][1])];
        canvas.nodes.push(mark(5, ax, ay, 5, { fill: "var(--soft)", "fill-opacity": 0.8 }));
        canvas.points.push({ x: ax, y: ay, title: `class ${name}`, text: "anchor" });
      }
      for (const k of members) {
        const count = geometry.counts ? geometry.counts[k][c] : null;
        const group = count !== null && count < geometry.least ? GROUPS.unsure : GROUPS.client;
        if (!shown(group)) continue;
        const [px, py] = [x(geometry.points[k][c][0]), y(geometry.points[k][c][1])];
        canvas.nodes.push(shape("line", { x1: sx, y1: sy, x2: px, y2: py, stroke: hue, "stroke-opacity": 0.3 }));
        canvas.nodes.push(mark(0, px, py, 3.6, { fill: group === GROUPS.unsure ? "var(--ground)" : hue, stroke: hue, "stroke-width": 1.3 }));
        canvas.points.push({ x: px, y: py, title: `class ${name}, client ${geometry.clients[k]}`, text: count === null ? "client" : `${count} image${count === 1 ? "" : "s"} of it` });
      }
      if (shown(GROUPS.fused)) {
        canvas.nodes.push(mark(1, sx, sy, 4.5, { fill: hue, stroke: "var(--ground)", "stroke-width": 1 }));
        if (run.classes.length <= 40) canvas.nodes.push(label(sx + 8, sy - 6, shorten(name, 12), { style: "font-weight:600" }));
        canvas.points.push({ x: sx, y: sy, title: `class ${name}`, text: `fused: ${geometry.rule}` });
      }
    });
  });

  figure("fig-classes", (canvas) => {
    const run = current(), names = Object.keys(run.fusions);
    canvas.shown = runWords();
    canvas.about = `Accuracy per class of ${names.join(", ")}`;
    canvas.keys = names.map((name) => ({ name, colour: colour(fusionIndex(name)), mark: fusionIndex(name), line: false }));
    const long = Math.max(...run.classes.map((name) => name.length)) > 3;
    canvas.height = long ? 350 : 310;
    const area = { left: 38, right: canvas.width - 8, top: 28, bottom: 262 };
    const y = linear(0, 100, area.bottom, area.top);
    axes(canvas, { ticks: [] }, y, area, { y: "recognised %", x: long ? "" : "class" });
    const wide = (area.right - area.left) / run.classes.length, every = Math.ceil(13 / wide);
    canvas.reach = 24;
    run.classes.forEach((name, c) => {
      const centre = area.left + (c + 0.5) * wide;
      if (c % every === 0) canvas.nodes.push(label(centre, area.bottom + 18, shorten(name, 12), { class: "faint", ...(long ? { "text-anchor": "end", transform: `rotate(-45 ${centre} ${area.bottom + 18})` } : { "text-anchor": "middle" }) }));
      names.filter((fusion) => !canvas.hidden.has(fusion)).forEach((fusion, k, visible) => {
        const value = run.fusions[fusion].per_class[c];
        if (value === null) return;
        const x = centre + (k - (visible.length - 1) / 2) * Math.min(7, (0.8 * wide) / visible.length), index = fusionIndex(fusion);
        canvas.nodes.push(mark(index, x, y.at(100 * value), Math.min(4, Math.max(2, wide / 6)), { fill: colour(index) }));
        canvas.points.push({ x, y: y.at(100 * value), title: `class ${name}, ${fusion}`, text: percent(value) });
      });
    });
  });

  figure("fig-calibration", (canvas) => {
    const run = current(), names = Object.keys(run.fusions).filter((name) => run.fusions[name].reliability);
    canvas.shown = runWords();
    if (!names.length) return "This run was measured before reliability was kept; its calibration error is in the table above.";
    canvas.about = `Accuracy against confidence of ${names.join(", ")}`;
    canvas.keys = names.map((name) => ({ name, colour: colour(fusionIndex(name)), mark: fusionIndex(name) }));
    canvas.height = 310;
    const area = { left: 38, right: canvas.width - 12, top: 28, bottom: 262 };
    const x = linear(0, 100, area.left, area.right), y = linear(0, 100, area.bottom, area.top);
    axes(canvas, x, y, area, { x: "confidence %", y: "right %" });
    canvas.nodes.push(shape("line", { x1: x.at(0), y1: y.at(0), x2: x.at(100), y2: y.at(100), stroke: "var(--soft)", "stroke-dasharray": "4 4" }));
    for (const name of names) {
      if (canvas.hidden.has(name)) continue;
      const bins = run.fusions[name].reliability, k = fusionIndex(name);
      const xs = bins.map((bin) => x.at(100 * bin.confidence)), ys = bins.map((bin) => y.at(100 * bin.accuracy));
      canvas.nodes.push(line(xs, ys, { stroke: colour(k), "stroke-width": 1.6 }));
      bins.forEach((bin, i) => {
        canvas.nodes.push(mark(k, xs[i], ys[i], 3.6, { fill: colour(k) }));
        canvas.points.push({ x: xs[i], y: ys[i], title: `${name}, ${bin.count} image${bin.count === 1 ? "" : "s"}`, text: `says ${percent(bin.confidence)}, right ${percent(bin.accuracy)}` });
      });
    }
  });

  // ---- words that follow the chosen run ----
  function leftOut() {
    byId("left-out").textContent = current().left_out.map((row) => `Client ${row.client} was left out: ${row.reason}.`).join(" ");
  }
  const WORDS = {
    g_protos_std: "scale of the mean prototype", inter_client_proto_std: "prototype spread over clients", etf_distance: "distance to the simplex",
    nc1: "NC1, spread within classes", nc2: "NC2, distance from equal angles", cka: "CKA between clients", parameter_variance: "parameter variance over clients",
  };
  function diagnostics() {
    const values = current().diagnostics || {};
    byId("diagnostics").replaceChildren(...Object.entries(WORDS).filter(([key]) => typeof values[key] === "number").map(([key, text]) =>
      make("div", {}, make("dt", {}, text), make("dd", { "data-value": values[key] }, String(+values[key].toPrecision(3))))));
  }
  function clientChoices() {
    const select = byId("client"), run = current(), most = 500;
    const options = [make("option", { value: "all" }, "all")];
    for (let client = 0; client < Math.min(run.clients, most); client++) options.push(make("option", { value: client }, String(client)));
    select.replaceChildren(...options);
    if (state.client !== "all" && state.client >= run.clients) state.client = "all";
    select.value = String(state.client);
  }
  const INSIDE = ["fig-clients", "fig-lambda", "fig-cosines", "fig-map", "fig-classes", "fig-calibration"];
  const redraw = (ids) => ids.forEach((id) => figures[id] && figures[id]());
  function choose(id, change) {
    const select = byId(id);
    if (select) select.addEventListener("change", () => change(select.value));
  }
  const fusionSelect = byId("fusion");
  if (fusionSelect) fusionSelect.append(make("option", { value: "main" }, story.kind === "study" ? "the tested one" : "each method's own"), ...fusionNames.map((name) => make("option", { value: name }, name)));
  function showPanel() {
    if (document.body.hasAttribute("data-all")) return;
    document.querySelectorAll(".panel").forEach((node) => { node.hidden = Number(node.dataset.panel) !== state.panel; });
  }
  choose("panel", (value) => { state.panel = Number(value); showPanel(); redraw(["fig-comparison", "fig-checkpoints", "fig-lambdas"]); });
  choose("fusion", (value) => { state.fusion = value; redraw(["fig-comparison", "fig-checkpoints"]); });
  choose("run", (value) => { state.run = Number(value); clientChoices(); leftOut(); diagnostics(); redraw(INSIDE); });
  choose("client", (value) => { state.client = value === "all" ? "all" : Number(value); redraw(INSIDE); });
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  if (story.runs.length) { clientChoices(); leftOut(); diagnostics(); } else { for (const id of INSIDE) delete figures[id]; }
  showPanel();
  redraw(Object.keys(figures));
  let seen = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === seen) return;
    seen = document.body.clientWidth;
    requestAnimationFrame(() => redraw(Object.keys(figures)));
  }).observe(document.body);
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details.configuration:not([open])")].slice(0, 12); opened.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((d) => { d.open = false; }));
  document.documentElement.dataset.ready = "yes";
})();
