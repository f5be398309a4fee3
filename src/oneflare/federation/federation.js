// The figures of a federation's page: who has which class, what is taken for what, and how sure the model is.
const namesRoom = (names, least, most) => Math.min(most, Math.max(least, 14 + Math.max(...names.map(textWidth))));
const longest = (names) => Math.max(...names.map((name) => name.length));
const images = (n) => `${n} image${n === 1 ? "" : "s"}`;

figure("fig-owners", (canvas) => {
  if (!story.table) return "The members withhold how many images of each class they have.";
  const peak = Math.max(1, ...story.table.flat()), names = story.members;
  const left = namesRoom(names, 50, narrow(canvas) ? 110 : 200), foot = 7 * longest(story.classes) > (canvas.width - left) / story.classes.length ? 84 : 26;
  const high = Math.max(16, Math.min(30, 1400 / names.length));
  canvas.height = 8 + high * names.length + foot;
  canvas.about = `Training images of ${names.join(", ")} by class`;
  const area = { left, right: canvas.width - 4, top: 8, bottom: canvas.height - foot };
  const rows = names.map((name) => ({ name, title: name, room: Math.floor((left - 12) / 7), say: images }));
  const columns = story.classes.map((name) => ({ name, title: name }));
  heatmap(canvas, rows, columns, (r, c) => story.table[r][c], (n) => ["fill", n ? 0.08 + 0.92 * Math.sqrt(n / peak) : 0], (n) => (n ? String(n) : ""), area, 24);
});

figure("fig-confusion", (canvas) => {
  const table = story.confusion, names = story.classes;
  if (!table) return "There is no confusion matrix: nobody has measured the model, or there are too many classes.";
  const left = namesRoom(names, 30, narrow(canvas) ? 90 : 150);
  const side = Math.min(canvas.width - left - 4, Math.max(240, 46 * names.length));
  const foot = 7 * longest(names) > side / names.length ? 100 : 44;
  const high = Math.max(18, side / names.length);
  canvas.height = 26 + high * names.length + foot;
  canvas.about = `Confusion matrix of ${names.length} classes: rows are the true classes, columns the answers`;
  const area = { left, right: left + side, top: 26, bottom: 26 + high * names.length };
  const totals = table.map((row) => row.reduce((sum, n) => sum + (n || 0), 0) || 1);
  const hiddenBy = (r, c) => (story.untold ? story.untold[r][c] : 0);
  const rows = names.map((name, r) => ({ name, title: `${name}, shown`, room: Math.floor((left - 12) / 7), say: (cell) => cell.text }));
  const columns = names.map((name) => ({ name, title: `answered ${name}` }));
  const value = (r, c) => {
    const n = table[r][c], hidden = hiddenBy(r, c);
    const share = n === null ? 0 : n / totals[r];
    const text = n === null ? "withheld: too few images" : images(n) + (hidden ? `, and what ${hidden} member${hidden === 1 ? "" : "s"} withheld` : "");
    return { n, share, text, right: r === c, hidden };
  };
  heatmap(canvas, rows, columns, value, (cell) => [cell.right ? "negative" : "positive", cell.n ? 0.06 + 0.94 * Math.sqrt(cell.share) : 0],
    (cell) => (cell.n === null ? "·" : cell.n || cell.hidden ? `${cell.n || ""}${cell.hidden ? "+" : ""}` : ""), area, 22);
  canvas.nodes.push(label(0, 14, "true class", { class: "faint" }), label(area.right, canvas.height - 4, "answer", { class: "faint", "text-anchor": "end" }));
});

figure("fig-reliability", (canvas) => {
  const bins = story.reliability;
  if (!bins || !bins.length) return "Nobody has measured how sure the model is and how often it is right.";
  canvas.about = "How often the model is right against how sure it is";
  canvas.height = 310;
  const area = { left: 38, right: canvas.width - 12, top: 28, bottom: 262 };
  const x = linear(0, 100, area.left, area.right), y = linear(0, 100, area.bottom, area.top);
  axes(canvas, x, y, area, { x: "how sure it is, %", y: "how often it is right, %" });
  canvas.nodes.push(shape("line", { x1: x.at(0), y1: y.at(0), x2: x.at(100), y2: y.at(100), stroke: "var(--soft)", "stroke-dasharray": "4 4" }));
  const xs = bins.map((bin) => x.at(100 * bin.confidence)), ys = bins.map((bin) => y.at(100 * bin.accuracy));
  const all = bins.reduce((sum, bin) => sum + bin.count, 0) || 1;
  canvas.nodes.push(line(xs, ys, { stroke: colour(0), "stroke-width": 1.3, "stroke-opacity": 0.6 }));
  bins.forEach((bin, i) => {
    canvas.nodes.push(mark(0, xs[i], ys[i], 2 + 7 * Math.sqrt(bin.count / all), { fill: colour(0) }));
    canvas.points.push({ x: xs[i], y: ys[i], title: images(bin.count), text: `says ${percent(bin.confidence)}, right ${percent(bin.accuracy)}` });
  });
});

figure("fig-rates", (canvas) => {
  const rates = story.rates, names = story.classes;
  if (!rates || !rates.some((rate) => rate.sensitivity)) return "Nobody tells of any class.";
  canvas.about = `Sensitivity of ${names.join(", ")} with intervals of 95 %`;
  canvas.keys = [{ name: "sensitivity", colour: colour(0), mark: 0, line: false }, { name: "specificity", colour: colour(1), mark: 3, line: false }];
  const stacked = narrow(canvas), high = stacked ? 40 : 26;
  const left = stacked ? 8 : namesRoom(names, 40, 200);
  canvas.height = 46 + high * names.length;
  const area = { left, right: canvas.width - 14, top: 4, bottom: 4 + high * names.length };
  const x = linear(0, 100, area.left, area.right);
  for (const tick of x.ticks) {
    canvas.nodes.push(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }));
    canvas.nodes.push(label(x.at(tick), area.bottom + 18, x.text(tick), { "text-anchor": "middle", class: "faint" }));
  }
  canvas.nodes.push(label((area.left + area.right) / 2, area.bottom + 36, "%", { "text-anchor": "middle", class: "faint" }));
  canvas.reach = 22;
  names.forEach((name, k) => {
    const y = area.top + high * (k + 0.5) + (stacked ? 7 : 0);
    if (stacked) canvas.nodes.push(label(0, y - 12, shorten(name, 40), { class: "halo" }));
    else canvas.nodes.push(label(left - 10, y + 4, shorten(name, Math.floor((left - 12) / 7)), { "text-anchor": "end" }));
    ["sensitivity", "specificity"].forEach((kind, index) => {
      const rate = rates[k][kind];
      if (!rate || canvas.hidden.has(kind)) return;
      const at = y + (index ? 5 : -5);
      errorBar(canvas.nodes, x.at(100 * rate.low), at, x.at(100 * rate.high), at, colour(index), 3);
      canvas.nodes.push(mark(index ? 3 : 0, x.at(100 * rate.value), at, 4, { fill: colour(index) }));
      canvas.points.push({ x: x.at(100 * rate.value), y: at, title: `${name}, ${kind}`, text: `${percent(rate.value)} (${percent(rate.low)} to ${percent(rate.high)})` });
    });
  });
});
