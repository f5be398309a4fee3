"use strict";
const byId = (id) => document.getElementById(id);
const drop = byId("drop");
const file = byId("file");
const answers = byId("answers");
let queue = Promise.resolve();

function make(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...children);
  return node;
}

function percent(value) {
  return (100 * value).toFixed(1) + " %";
}

function bar(one) {
  const bar = make("div", "bar", make("div", "fill"));
  bar.firstChild.style.width = `${100 * one.probability}%`;
  let text = percent(one.probability);
  if (one.threshold !== undefined) {
    const limit = make("div", "limit");
    limit.style.left = `${100 * one.threshold}%`;
    bar.append(limit);
    text += ", threshold " + percent(one.threshold);
  }
  bar.title = text;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", one.class + ": " + text);
  return bar;
}

function show(entry, content) {
  const answer = entry.querySelector(".answer");
  if (content.error) {
    answer.textContent = content.error;
    answer.classList.add("bad");
    return;
  }
  const best = content.predictions[0];
  answer.textContent = best.known === false
    ? "none of the known classes (nearest: " + best.nearest + ")"
    : best.class + " (" + percent(best.probability) + ")";
  answer.classList.toggle("none", best.known === false);
  const table = make("table", "top");
  for (const one of best.top) {
    table.append(make("tr", "", make("td", "class", one.class), make("td", "", bar(one)), make("td", "share", percent(one.probability))));
  }
  entry.append(table);
}

function entryOf(image) {
  const preview = make("img", "preview");
  preview.alt = "";
  preview.src = URL.createObjectURL(image);
  preview.addEventListener("error", () => { preview.style.visibility = "hidden"; }); // a format that the browser cannot draw
  return make("article", "image", preview, make("p", "name", image.name), make("p", "answer", "…"));
}

async function ask(image, entry) {
  let content;
  try {
    const reply = await fetch("/predict", {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream" },
      body: image,
    });
    content = await reply.json();
  } catch {
    content = { error: "the server does not answer" };
  }
  show(entry, content);
}

function take(files) {
  byId("problem").textContent = files.length ? "" : "that was not a file";
  const images = [...files], entries = images.map(entryOf);
  answers.prepend(...entries);
  images.forEach((image, index) => { queue = queue.then(() => ask(image, entries[index])); });
}

file.addEventListener("change", () => {
  if (file.files.length) take(file.files);
  file.value = ""; // so that the same file can be chosen again
});
for (const name of ["dragenter", "dragover"]) {
  drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) {
  drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.remove("over"); });
}
drop.addEventListener("drop", (event) => take(event.dataTransfer.files));
for (const name of ["dragover", "drop"]) {
  window.addEventListener(name, (event) => event.preventDefault()); // beside the zone: do not leave the page
}
fetch("/about").then((reply) => reply.json()).then((about) => {
  byId("use").textContent = about.use || "";
  byId("limits").hidden = !about.limits.length;
  byId("limit-lines").replaceChildren(...about.limits.map((line) => make("li", "", line)));
  const kind = about.image.channels === 1 ? "grey" : "colour";
  const told = [about.classes.length + " classes; every image is brought to " + about.image.size + "x" + about.image.size
    + " " + kind + ". Pictures stay on the machine that serves this page."];
  if (about.thresholds && about.thresholds.some((threshold) => threshold !== null)) {
    told.push("A class with a threshold, the line in its bar, is the answer as soon as its probability reaches it.");
  }
  told.push(about.keeps === null
    ? "Every image gets a class, also one that shows none of them."
    : "An image that the members do not know gets no class; " + percent(about.keeps) + " of known images were to be kept.");
  byId("about").textContent = told.join(" ");
});
