// What every page does: the first drawing, light and dark, wide tables, paper.
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
redraw(Object.keys(figures));
let seen = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === seen) return;
  seen = document.body.clientWidth;
  requestAnimationFrame(() => redraw(Object.keys(figures)));
}).observe(document.body);
// A table that is wider than the page says so by a shadow, and can be scrolled by keyboard.
function scrollers() {
  for (const node of document.querySelectorAll(".wide")) {
    const more = node.scrollWidth > node.clientWidth + 1;
    if (more) node.tabIndex = 0; else node.removeAttribute("tabindex");
    node.classList.toggle("more", more && node.scrollLeft + node.clientWidth < node.scrollWidth - 2);
  }
}
document.querySelectorAll(".wide").forEach((node) => node.addEventListener("scroll", scrollers, { passive: true }));
addEventListener("toggle", scrollers, true);
new ResizeObserver(scrollers).observe(document.body);
scrollers();
// Paper: figures are drawn again at its width, so that their text keeps its size; settings are opened.
let opened = [];
addEventListener("beforeprint", () => {
  document.body.classList.add("printing");
  redraw(Object.keys(figures));
  opened = [...document.querySelectorAll("details.rule:not([open]), details.configuration:not([open]):not(#runs)")];
  opened.forEach((node) => { node.open = true; });
});
addEventListener("afterprint", () => {
  opened.forEach((node) => { node.open = false; });
  document.body.classList.remove("printing");
  redraw(Object.keys(figures));
});
document.documentElement.dataset.ready = "yes";
