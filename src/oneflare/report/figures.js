// The figures, each drawn from the story and the reader's choices.
// ---- the figures ----
const labels = [...new Set(story.panels.flatMap((panel) => panel.rows.map((row) => row.label)))];
const fusionNames = [...new Set(story.panels.flatMap((panel) => panel.rows.map((row) => row.fusion)))];
const everyFusion = [...new Set([...fusionNames, ...story.runs.flatMap((run) => Object.keys(run.fusions))])];
const fusionIndex = (name) => everyFusion.indexOf(name);
const single = story.kind === "run";
const chosen = (entries) => entries.filter((entry) => (single ? true : state.fusion === "main" ? entry.main : entry.fusion === state.fusion));
const nameOf = (entry) => (single ? entry.fusion : entry.label);
const indexOf = (entry) => (single ? fusionIndex(entry.fusion) : labels.indexOf(entry.label));
const fusionWords = () => (single ? "" : state.fusion === "main" ? (story.kind === "study" ? "each under the study's main fusion" : "each method under its own fusion") : `all fused by ${state.fusion}`);

figure("fig-comparison", (canvas) => {
  const panel = story.panels[state.panel];
  const rows = chosen(panel.rows);
  canvas.shown = [story.panels.length > 1 ? panel.title : "", fusionWords()].filter(Boolean).join("; ");
  canvas.about = `Test accuracy of ${rows.map(nameOf).join(", ")}`;
  if (!rows.length) return "No method has this fusion.";
  const seeds = rows.some((row) => row.accuracies.length > 1);
  if (seeds) canvas.keys.push({ name: "single seeds", colour: "var(--soft)", mark: 0, hollow: true, line: false });
  // On a phone the name stands above its bar, so that no name is cut.
  const stacked = narrow(canvas), high = stacked ? 48 : 38;
  const left = stacked ? 8 : 16 + Math.max(...rows.map((row) => textWidth(nameOf(row))));
  canvas.height = 56 + high * rows.length;
  const area = { left, right: canvas.width - (stacked ? 12 : 92), top: 8, bottom: canvas.height - 46 };
  const values = rows.flatMap((row) => [...row.accuracies, row.low, row.high]).filter((value) => value !== null);
  const [least, most] = around(values);
  const x = linear(100 * least, 100 * most, area.left, area.right);
  for (const tick of x.ticks) {
    canvas.nodes.push(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }));
    canvas.nodes.push(label(x.at(tick), area.bottom + 18, x.text(tick), { "text-anchor": "middle", class: "faint" }));
  }
  canvas.nodes.push(label((area.left + area.right) / 2, area.bottom + 38, "test accuracy %", { "text-anchor": "middle", class: "faint" }));
  rows.forEach((row, k) => {
    const top = area.top + high * k, y = top + (stacked ? 28 : 19), stroke = colour(indexOf(row));
    const figures = (100 * row.mean).toFixed(1) + spread(row);
    if (stacked) {
      canvas.nodes.push(shape("rect", { x: 0, y: top, width: canvas.width, height: 17, fill: "var(--ground)" }));
      canvas.nodes.push(label(0, top + 13, nameOf(row)), label(canvas.width, top + 13, figures, { "text-anchor": "end", class: "value" }));
    } else {
      canvas.nodes.push(label(left - 12, y + 4, nameOf(row), { "text-anchor": "end" }), label(area.right + 10, y + 4, figures, { class: "value" }));
    }
    const at = x.at(100 * row.mean);
    if (row.low !== null) errorBar(canvas.nodes, x.at(100 * Math.max(0, row.low)), y, x.at(100 * Math.min(1, row.high)), y, stroke);
    if (seeds && !canvas.hidden.has("single seeds")) row.accuracies.forEach((value, seed) => {
      canvas.nodes.push(shape("circle", { cx: x.at(100 * value), cy: y + 10, r: 3, fill: "none", stroke, "stroke-width": 1.3 }));
      canvas.points.push({ x: x.at(100 * value), y: y + 10, title: `${nameOf(row)}, seed ${row.seeds[seed]}`, text: percent(value) });
    });
    canvas.nodes.push(mark(indexOf(row), at, y, 5.5, { fill: stroke }));
    const gap = row.gap ? `; ${signed(100 * row.gap.mean)} points to ${row.gap.against}` : "";
    canvas.points.push({ x: at, y, title: single ? row.fusion : `${row.label}, ${row.fusion}`, text: `${figures} %${gap}` });
  });
});

// A line per method within every setting: settings are no scale, so nothing joins them.
figure("fig-settings", (canvas) => {
  const panels = story.panels, names = panels.map((panel) => panel.title);
  canvas.keys = labels.map((name, k) => ({ name, colour: colour(k), mark: k, line: false }));
  canvas.about = `Accuracy of ${labels.join(", ")} over ${names.join("; ")}`;
  const rows = panels.map((panel) => panel.rows.filter((row) => row.main));
  const visible = labels.filter((name) => !canvas.hidden.has(name));
  const stacked = narrow(canvas), step = 10, head = stacked ? 20 : 6, high = head + step * Math.max(3, visible.length) + 8;
  const left = stacked ? 8 : 20 + Math.max(...names.map(textWidth));
  canvas.height = 52 + high * panels.length;
  const area = { left, right: canvas.width - 14, top: 4, bottom: 4 + high * panels.length };
  const [low, top] = around(rows.flat().flatMap((row) => [row.mean - (row.std || 0), row.mean + (row.std || 0)]));
  const x = linear(100 * low, 100 * top, area.left, area.right);
  for (let p = 0; p < panels.length; p += 2) canvas.nodes.push(shape("rect", { class: "band", x: 0, y: area.top + high * p, width: canvas.width, height: high }));
  const nameSettings = () => names.forEach((name, p) => {
    canvas.nodes.push(stacked ? label(6, area.top + high * p + 15, name, { class: "halo" }) : label(left - 12, area.top + high * (p + 0.5) + 4, name, { "text-anchor": "end" }));
  });
  for (const tick of x.ticks) {
    canvas.nodes.push(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }));
    canvas.nodes.push(label(x.at(tick), area.bottom + 18, x.text(tick), { "text-anchor": "middle", class: "faint" }));
  }
  nameSettings();
  canvas.nodes.push(label((area.left + area.right) / 2, area.bottom + 38, "test accuracy %", { "text-anchor": "middle", class: "faint" }));
  rows.forEach((here, p) => here.forEach((row) => {
    const place = visible.indexOf(row.label), k = labels.indexOf(row.label);
    if (place < 0) return;
    const y = area.top + high * p + head + step * (place + 0.5), at = x.at(100 * row.mean);
    if (row.std !== null) errorBar(canvas.nodes, x.at(100 * Math.max(0, row.mean - row.std)), y, x.at(100 * Math.min(1, row.mean + row.std)), y, colour(k), 3);
    canvas.nodes.push(mark(k, at, y, 4.2, { fill: colour(k) }));
    canvas.points.push({ x: at, y, title: `${row.label}, ${names[p]}`, text: `${(100 * row.mean).toFixed(1)}${spread(row)} %` });
  }));
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
  if (!curves.some((curve) => curve.epochs.length > 1)) return "There are no checkpoints: train.snapshots is 0, or the method does not train.";
  canvas.about = `Accuracy over epochs of ${curves.map(nameOf).join(", ")}`;
  canvas.keys = curves.map((curve) => ({ name: nameOf(curve), colour: colour(indexOf(curve)), mark: indexOf(curve) }));
  const drawn = curves.filter((curve) => !canvas.hidden.has(nameOf(curve)));
  const area = { left: 40, right: canvas.width - endRoom(canvas, curves.map(nameOf)), top: 28, bottom: 272 };
  canvas.height = 320;
  const [low, high] = around(curves.flatMap((curve) => [...curve.low, ...curve.high]));
  const y = linear(100 * low, 100 * high, area.bottom, area.top);
  const last = Math.max(...curves.flatMap((curve) => curve.epochs));
  const first = Math.min(...curves.flatMap((curve) => curve.epochs));
  const room = Math.min(14, 3 * curves.length);
  const x = linear(first, last, area.left + room, area.right - room, true);
  axes(canvas, x, y, area, { x: "epoch at which fusion is simulated", y: "test accuracy %" });
  for (const curve of drawn) {
    const k = indexOf(curve), xs = curve.epochs.map(x.at), ys = curve.mean.map((value) => y.at(100 * value));
    const shift = (drawn.indexOf(curve) - (drawn.length - 1) / 2) * 3;
    if (!single) curve.low.forEach((value, i) => value !== curve.high[i] && (curves.length <= 5 || i === curve.low.length - 1) && canvas.nodes.push(shape("line", { x1: xs[i] + shift, x2: xs[i] + shift, y1: y.at(100 * value), y2: y.at(100 * curve.high[i]), stroke: colour(k), "stroke-opacity": 0.55, "stroke-width": 1.5 })));
    canvas.nodes.push(line(xs, ys, { stroke: colour(k) }));
    curve.epochs.forEach((epoch, i) => {
      canvas.nodes.push(mark(k, xs[i], ys[i], i === curve.epochs.length - 1 ? 5 : 3.5, { fill: colour(k) }));
      canvas.points.push({ x: xs[i], y: ys[i], title: `${nameOf(curve)}, epoch ${epoch}`, text: percent(curve.mean[i]) + (single || curve.low[i] === curve.high[i] ? "" : ` (seeds ${(100 * curve.low[i]).toFixed(1)} to ${(100 * curve.high[i]).toFixed(1)})`) });
    });
  }
  if (endRoom(canvas, curves.map(nameOf)) > 14) endLabels(canvas, area, drawn.map((curve) => ({ name: nameOf(curve), colour: colour(indexOf(curve)), y: y.at(100 * curve.mean[curve.mean.length - 1]) })));
});

const current = () => story.runs[state.run];
const runWords = () => (story.runs.length > 1 ? current().label : "");

figure("fig-clients", (canvas) => {
  const run = current(), peak = Math.max(1, ...run.table.flat());
  const shownRows = run.table.length < run.clients ? `first ${run.table.length} of ${run.clients} clients` : "";
  canvas.shown = [runWords(), shownRows].filter(Boolean).join("; ");
  canvas.about = `Training images of ${run.table.length} clients by class`;
  const high = Math.max(6, Math.min(28, 1400 / run.table.length));
  const foot = Math.max(...run.classes.map((name) => name.length)) > 3 ? 78 : 42;
  canvas.height = 8 + high * run.table.length + foot;
  const area = { left: 70, right: canvas.width - 4, top: 8, bottom: canvas.height - foot };
  const rows = run.table.map((counts, client) => ({
    name: `client ${client}`, title: `client ${client}`, say: (n) => `${n} image${n === 1 ? "" : "s"}`,
    strong: state.client === "all" || state.client === client,
  }));
  const columns = run.classes.map((name) => ({ name, title: `class ${name}` }));
  const faded = (r) => (state.client === "all" || state.client === r ? 1 : 0.35);
  heatmap(canvas, rows, columns, (r, c) => run.table[r][c], (n, r) => ["fill", n ? faded(r) * (0.08 + 0.92 * Math.sqrt(n / peak)) : 0], (n) => (n ? String(n) : ""), area, 24);
  if (foot === 42) canvas.nodes.push(label((area.left + area.right) / 2, canvas.height - 6, "class", { "text-anchor": "middle", class: "faint" }));
});

// Raw (dashed) and effective (solid) lambda of several curves on a logarithmic axis.
function drawLambda(canvas, curves, bound) {
  const many = curves.length > 12;
  if (!many) canvas.keys = curves.map((row) => ({ name: row.name, colour: colour(row.index), mark: row.index }));
  canvas.keys.push({ name: "effective", colour: "var(--ink)" }, { name: "raw", colour: "var(--ink)", dash: "5 4" });
  const kinds = ["effective", "raw"].filter((kind) => !canvas.hidden.has(kind));
  const all = curves.flatMap((row) => [...row.raw, ...row.effective]).concat(bound || []).filter((value) => value > 0);
  const top = Math.max(...all), floor = Math.max(Math.min(...all), top * 1e-5);
  const room = many ? 14 : endRoom(canvas, curves.map((row) => row.name));
  const area = { left: 52, right: canvas.width - room, top: 28, bottom: 292 };
  canvas.height = 340;
  const y = logarithmic(floor, top * 1.05, area.bottom, area.top);
  const epochs = curves.flatMap((row) => row.epochs);
  const x = linear(Math.min(...epochs), Math.max(...epochs), area.left, area.right, true);
  axes(canvas, x, y, area, { x: "epoch", y: "lambda" });
  if (bound) {
    canvas.nodes.push(shape("line", { class: "valve", x1: area.left, x2: area.right, y1: y.at(bound), y2: y.at(bound), stroke: "var(--ink)", "stroke-width": 1.2, "stroke-dasharray": "2 3" }));
    canvas.nodes.push(label(area.right, y.at(bound) - 5, `valve at ${bound}`, { "text-anchor": "end" }));
  }
  const last = (row) => row.effective.filter((value) => value !== null).pop() || 0;
  const ends = curves.filter((row) => !canvas.hidden.has(row.name)).map((row) => ({ name: row.name, colour: colour(row.index), y: y.at(Math.max(last(row), y.low)) }));
  if (room > 14 && kinds.includes("effective")) endLabels(canvas, area, ends);
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
  heatmap(canvas, names, names, (r, c) => matrix[r][c], (value) => [value >= 0 ? "positive" : "negative", Math.min(1, Math.abs(value))],
    (value) => (+value.toFixed(2) + 0).toFixed(2).replace("0.", ".").replace("1.00", "1").replace("-", "−"), area, 26);
  const y = canvas.height - 14, steps = 21;
  for (let k = 0; k < steps; k++) {
    const value = -1 + (2 * k) / (steps - 1);
    canvas.nodes.push(shape("rect", { x: left + 22 + k * 7, y: y - 9, width: 7, height: 10, fill: value >= 0 ? "var(--positive)" : "var(--negative)", "fill-opacity": Math.abs(value) }));
  }
  canvas.nodes.push(label(left + 16, y, "−1", { "text-anchor": "end", class: "faint" }), label(left + 28 + 7 * steps, y, "1  cosine", { class: "faint" }));
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
  const taken = [];  // boxes of names: one that would cover another goes to another side of its mark
  const write = (name, sx, sy) => {
    const wide = textWidth(name), places = [[8, -6], [8, 15], [-8 - wide, -6], [-8 - wide, 15], [-wide / 2, -12], [-wide / 2, 22]];
    const free = ([dx, dy]) => sy + dy > 10 && !taken.some(([x0, y0, w]) => sx + dx < x0 + w && x0 < sx + dx + wide && Math.abs(sy + dy - y0) < 13);
    const [dx, dy] = places.find(free) || places[1];
    taken.push([sx + dx, sy + dy, wide]);
    canvas.nodes.push(label(sx + dx, sy + dy, name, { style: "font-weight:600" }));
  };
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
      if (run.classes.length <= 40) write(shorten(name, 12), sx, sy);
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
    if (c % 2 === 0 && run.classes.length <= 40) canvas.nodes.unshift(shape("rect", { class: "band", x: centre - wide / 2, y: area.top, width: wide, height: area.bottom - area.top }));
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
    canvas.nodes.push(line(xs, ys, { stroke: colour(k), "stroke-width": 1.3, "stroke-opacity": 0.6 }));
    const all = bins.reduce((sum, bin) => sum + bin.count, 0) || 1;
    bins.forEach((bin, i) => {
      canvas.nodes.push(mark(k, xs[i], ys[i], 2 + 6 * Math.sqrt(bin.count / all), { fill: colour(k) }));
      canvas.points.push({ x: xs[i], y: ys[i], title: `${name}, ${bin.count} image${bin.count === 1 ? "" : "s"}`, text: `says ${percent(bin.confidence)}, right ${percent(bin.accuracy)}` });
    });
  }
});
