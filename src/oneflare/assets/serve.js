"use strict";
const drop = document.getElementById("drop");
const file = document.getElementById("file");
const preview = document.getElementById("preview");
const answer = document.getElementById("answer");
const rows = document.getElementById("top");
const about = document.getElementById("about");
let turn = 0;

function say(text, bad) {
  answer.textContent = text;
  answer.classList.toggle("bad", Boolean(bad));
}

function percent(value) {
  return (100 * value).toFixed(1) + " %";
}

async function ask(image) {
  const mine = ++turn; // an answer that comes after a newer picture is not shown
  rows.replaceChildren();
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(image);
  preview.hidden = false;
  say("…");
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
  if (mine !== turn) return;
  if (content.error) {
    preview.hidden = true;
    say(content.error, true);
    return;
  }
  const best = content.predictions[0];
  say(best.class + " (" + percent(best.probability) + ")");
  for (const one of best.top) {
    const row = rows.insertRow();
    row.insertCell().textContent = one.class;
    const meter = document.createElement("meter");
    meter.value = one.probability;
    row.insertCell().append(meter);
    row.insertCell().textContent = percent(one.probability);
  }
}

file.addEventListener("change", () => {
  if (file.files.length) ask(file.files[0]);
  file.value = ""; // so that the same file can be chosen again
});
for (const name of ["dragenter", "dragover"]) {
  drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) {
  drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.remove("over"); });
}
drop.addEventListener("drop", (event) => {
  const image = event.dataTransfer.files[0];
  if (image) ask(image);
  else say("that was not a file", true);
});
for (const name of ["dragover", "drop"]) {
  window.addEventListener(name, (event) => event.preventDefault()); // beside the zone: do not leave the page
}
fetch("/health").then((reply) => reply.json()).then((health) => {
  const kind = health.image.channels === 1 ? "grey" : "colour";
  about.textContent = health.classes.length + " classes; every image is brought to " + health.image.size + "x"
    + health.image.size + " " + kind + ". Pictures stay on the machine that serves this page.";
});
