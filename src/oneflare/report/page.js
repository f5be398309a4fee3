// What follows the reader's choices, and the first drawing.
// ---- words that follow the chosen run ----
function leftOut() {
  byId("left-out").textContent = current().left_out.map((row) => `Client ${row.client} was left out: ${row.reason}.`).join(" ");
}
const WORDS = {
  inter_client_proto_std: ["prototype spread over clients", "how far clients disagree on where a class lies; 0: they agree"],
  g_protos_std: ["scale of the mean prototype", "falls toward 0 when clients cancel each other out"],
  etf_distance: ["distance to the simplex", "how far prototypes are from equally spread directions; 0: equally spread"],
  nc1: ["spread within classes (NC1)", "against the spread between classes; 0: every class is one point"],
  nc2: ["distance from equal angles (NC2)", "0: all pairs of classes at the same, widest angle"],
  cka: ["likeness of clients' features (CKA)", "1: the same up to rotation; 0: unrelated"],
  parameter_variance: ["variance of weights over clients", "how far training alone drove the networks apart"],
};
function diagnostics() {
  const values = current().diagnostics || {}, body = byId("diagnostics");
  if (!body) return;
  body.replaceChildren(...Object.entries(WORDS).filter(([key]) => typeof values[key] === "number").map(([key, [name, meaning]]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", { "data-value": values[key] }, String(+values[key].toPrecision(3))), make("td", { class: "text" }, meaning))));
  byId("numbers").hidden = !body.children.length;
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
if (story.runs.length) { clientChoices(); leftOut(); diagnostics(); } else { for (const id of INSIDE) delete figures[id]; }
showPanel();
