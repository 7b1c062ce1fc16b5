"use strict";

const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const root = document.documentElement;
const page = one("#pair"); // a helper's page has none
const storage = (() => { try { return localStorage; } catch { return {}; } })(); // blocked: nothing is remembered

// ------------------------------------------------------------------------------------------- which pair, and which line

const pieces = page && [...one("#pieces").content.children];
let shown = page?.dataset.first; // it stands in the page from the beginning

function show(hash) { // #mnist_ddp..mnist_amp:L33, or :left-L33 for a line of the left script
  if (document.getElementById(hash.slice(1))?.closest("main")) return; // an anchor
  const [, key, left, line] = /^#(\w+\.\.\w+)(?::(left-)?L(\d+))?$/.exec(hash || `#${page.dataset.first}`) ?? [];
  const pair = key === shown ? page : pairOf(key);
  if (pair && pair !== page) {
    shown = key;
    page.replaceChildren(pair);
    prepare();
    scrollTo(0, 0);
  }
  if (pair) choose();
  const cell = pair && line && one(`[data-column=${left ? "first" : "last"}][data-n="${line}"]`);
  const found = line ? cell : pair;
  one(".said").textContent = found ? "" : `This page has no ${hash.slice(1)}: choose two different scripts.`;
  goTo(cell);
}

function pairOf(key) { // it is stored in one direction only
  const [forward, backward] = [key, key?.split("..").reverse().join("..")].map((id) => document.getElementById(id));
  const pair = (forward ?? backward)?.content.cloneNode(true);
  for (const place of pair?.querySelectorAll(".row > *, .heads > *, .why") ?? []) {
    const numbers = place.textContent.split(" ").filter(Boolean);
    place.replaceChildren(...numbers.map((number) => pieces[number].cloneNode(true)));
  }
  if (backward) turn(pair);
  return pair;
}

function turn(pair) { // the notes explain the other direction
  for (const row of pair.querySelectorAll(".row:not(.equal), .heads")) row.append(row.firstChild);
  for (const why of pair.querySelectorAll(".why")) why.remove();
  const title = pair.querySelector("h2");
  title.textContent = title.textContent.split(" → ").reverse().join(" → ");
  const counts = pair.querySelector(".about b");
  counts.textContent = counts.textContent.replace(/(\d+)(.*?)(\d+)/, "$3$2$1");
}

function prepare() { // lines get their numbers and columns; a screen reader reads one of two equal lines
  for (const column of ["first", "last"]) {
    const lines = all(`.row > :${column}-child > code, .listing code`);
    lines.forEach((line, index) => Object.assign(line.dataset, { column, n: index + 1 }));
  }
  for (const cell of all(".equal > :first-child")) cell.ariaHidden = "true";
  for (const link of all(".equal > :first-child a")) link.tabIndex = -1;
}

function choose() {
  const [from, to] = shown.split("..");
  one("#left").value = from;
  one("#right").value = to;
  document.title = `${from} → ${to}: ddp-by-diff`;
  for (const chip of all(".chips a")) chip.ariaCurrent = chip.hash === `#${shown}` ? "true" : null;
}

function goTo(line) {
  for (const before of all(".here")) before.classList.remove("here");
  if (!line) return;
  if (line.closest("details")) line.closest("details").open = true;
  line.classList.add("here");
  line.scrollIntoView({ block: "center" });
}

let stop = null; // the change, or function, that was visited last
document.addEventListener("focusin", (event) => { stop = event.target.closest(".note, .definition") ?? stop; });

function step(by) {
  const stops = all(".note, .definition");
  stops[Math.max(0, stops.indexOf(stop) + by)]?.focus();
}

function stepPair(by) { // on a helper's page: to the next page
  const links = all(page ? ".chips a" : "header nav a");
  links[links.findIndex((link) => link.ariaCurrent) + by]?.click();
}

function fold() {
  const folds = all("details");
  const open = folds.some((part) => !part.open);
  for (const part of folds) part.open = open;
}

// --------------------------------------------------------------------------------------------------------- theme, keys

function setTheme(theme) {
  root.dataset.theme = theme;
  one("#theme").textContent = theme;
}

function nextTheme() {
  const themes = ["system", "dark", "light"];
  const theme = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
  setTheme(theme);
  storage["ddp-by-diff theme"] = theme;
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  n: () => stepPair(1),
  p: () => stepPair(-1),
  f: fold,
  t: nextTheme,
  "?": () => one("dialog").showModal(),
};

document.addEventListener("keydown", (event) => {
  const busy = event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input, dialog");
  if (!busy && one("#keys-on").checked && Object.hasOwn(KEYS, event.key)) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

// ---------------------------------------------------------------------------------------------------- copying a column

let wholeFile = null; // what the copy button puts on the clipboard

function columnOf(node) {
  return (node.closest ? node : node.parentElement).closest("[data-column]")?.dataset.column;
}

function copied(selection) { // the file's text, folded lines included; "" if the selection lies within a line
  const column = selection.anchorNode && columnOf(selection.anchorNode);
  if (!column) return "";
  const lines = selection.getRangeAt(0).cloneContents().querySelectorAll(`[data-column=${column}]`);
  return [...lines].map((line) => line.textContent).join("");
}

document.addEventListener("copy", (event) => {
  const text = wholeFile ?? copied(getSelection());
  if (text) {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  }
});

document.addEventListener("mousedown", (event) => {
  if (page) page.dataset.column = columnOf(event.target) ?? "";
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.key) KEYS[button.dataset.key]();
  if (button?.matches("[data-copy]")) {
    wholeFile = decodeURIComponent(button.nextElementSibling.href.split(",")[1]); // the link to download it
    button.textContent = document.execCommand("copy") ? "copied" : "not copied";
    wholeFile = null;
  }
  const line = event.target.closest("[data-n]");
  const gutter = line && parseFloat(getComputedStyle(line, "::before").width);
  if (line && event.clientX - line.getBoundingClientRect().left < gutter) {
    const left = line.dataset.column === "first" ? "left-" : "";
    location.hash = page ? `${shown}:${left}L${line.dataset.n}` : `L${line.dataset.n}`;
  }
});

// ---------------------------------------------------------------------------------------------------------------- start

setTheme(root.dataset.theme || "system");
one("#keys-on").checked = storage["ddp-by-diff keys"] !== "off";
one("#keys-on").addEventListener("change", (event) => {
  storage["ddp-by-diff keys"] = event.target.checked ? "on" : "off";
});
prepare();
if (page) {
  for (const list of all("select")) {
    list.addEventListener("change", () => { location.hash = `${one("#left").value}..${one("#right").value}`; });
  }
  choose();
  addEventListener("hashchange", () => show(location.hash));
  show(location.hash);
}
