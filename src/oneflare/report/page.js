// What follows the reader's choices, and the first drawing.
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
if (fusionSelect) fusionSelect.append(make("option", { value: "main" }, story.kind === "study" ? "the study's main one" : "each method's own"), ...fusionNames.map((name) => make("option", { value: name }, name)));
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
