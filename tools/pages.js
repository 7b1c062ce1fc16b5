"use strict";

const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const root = document.documentElement;
const page = one("#pair"); // steps.html has none
const storage = (() => { try { return localStorage; } catch { return {}; } })(); // blocked: nothing is remembered

// ---------------------------------------------------------------------------------------- which pair, change, and line

const pieces = page && [...one("#pieces").content.children];
let shown = page?.dataset.first; // it stands in the page from the beginning

function show(hash) { // #mnist_ddp..mnist_amp, then :change3, :L33, or :left-L33 for a line of the first script
  const form = /^#(\w+\.\.\w+)(?::change(\d+)|:(left-)?L(\d+))?$/;
  const [, key, change, left, line] = form.exec(hash || `#${page.dataset.first}`) ?? [];
  if (!key && document.getElementById(hash.slice(1))?.closest("main")) return; // an anchor
  const pair = key === shown ? page : pairOf(key);
  if (pair && pair !== page) {
    shown = key;
    page.replaceChildren(pair);
    prepare();
    scrollTo(0, 0);
  }
  if (pair) choose();
  const note = pair && change && all(".note")[change - 1];
  const cell = pair && line && one(`[data-column=${left ? "first" : "last"}][data-n="${line}"]`);
  const found = change ? note : line ? cell : pair;
  const advice = pair ? "" : " Choose two different scripts.";
  one(".said").textContent = found ? "" : `This page has no ${hash.slice(1)}.${advice}`;
  goTo(cell);
  if (note) visit(note);
  else if (playing() && !page.contains(stop)) visit(one(".note"));
}

function pairOf(key) { // it is stored in one direction only
  const [forward, backward] = [key, key?.split("..").reverse().join("..")].map((id) => document.getElementById(id));
  const pair = (forward ?? backward)?.content.cloneNode(true);
  for (const place of pair?.querySelectorAll(".row > *, .heads > * > *, .why") ?? []) {
    const runs = place.textContent.split(" ").filter(Boolean); // 7-9 12
    place.replaceChildren(...runs.flatMap((run) => {
      const [first, last = first] = run.split("-").map(Number);
      return pieces.slice(first, last + 1).map((piece) => piece.cloneNode(true));
    }));
  }
  if (backward) turn(pair);
  return pair;
}

function turn(pair) { // the notes explain the other direction
  for (const row of pair.querySelectorAll(".row:not(.equal), .heads > *")) row.append(row.firstChild);
  for (const why of pair.querySelectorAll(".why")) why.remove();
  const title = pair.querySelector("h2");
  title.textContent = title.textContent.split(" → ").reverse().join(" → ");
  const counts = pair.querySelector(".about b");
  counts.textContent = counts.textContent.replace(/(\d+)(.*?)(\d+)/, "$3$2$1");
}

function prepare() {
  for (const part of all(".pair")) {
    number(part, "first");
    number(part, "last");
    link(part, part === page ? shown : part.id);
  }
  for (const cell of all(".equal > :first-child")) cell.ariaHidden = "true"; // a screen reader reads one of the two
  for (const anchor of all(".equal > :first-child a")) anchor.tabIndex = -1;
}

function number(part, column) { // the lines; the link to download their file
  const lines = [...part.querySelectorAll(`.row > :${column}-child > code`)];
  lines.forEach((line, index) => Object.assign(line.dataset, { column, n: index + 1 }));
  const text = lines.map((line) => line.textContent).join("");
  const head = part.querySelector(`.heads > * > :${column}-child`);
  head.querySelector("[download]").href = `data:text/x-python;charset=utf-8,${encodeURIComponent(text)}`;
}

function link(part, key) { // each change
  part.querySelectorAll(".note").forEach((note, index) => {
    const anchor = note.querySelector("h3 a");
    Object.assign(note, { id: `${key}:change${index + 1}`, tabIndex: -1, role: "group", ariaLabel: anchor.textContent });
    anchor.href = `#${note.id}`;
  });
}

function choose() {
  const [from, to] = shown.split("..");
  one("#left").value = from;
  one("#right").value = to;
  one("#count").textContent = `${all(".note").length} changes`;
  document.title = `${from} → ${to}: ddp-by-diff`;
  for (const chip of all(".chips a")) chip.ariaCurrent = chip.hash === `#${shown}` ? "true" : null;
}

function goTo(line) {
  for (const before of all(".here")) before.classList.remove("here");
  if (!line) return;
  if (line.closest("details")) line.closest("details").open = true;
  if (playing() && !line.closest(".now")) setPlaying(false);
  const twin = line.closest(".equal")?.lastChild.children[[...line.parentNode.children].indexOf(line)];
  const seen = line.getClientRects().length ? line : twin; // a narrow page shows one of two equal lines
  seen.classList.add("here");
  seen.scrollIntoView({ block: "center" });
}

// ------------------------------------------------------------------------------------------------- from change to change

let stop = null; // the change that was visited last
document.addEventListener("focusin", (event) => { stop = event.target.closest(".note") ?? stop; });

function step(by) {
  const stops = all(".note");
  visit(stops[Math.max(0, stops.indexOf(stop) + by)]);
}

function visit(next) {
  if (!next) return;
  const change = next.nextElementSibling;
  for (const part of all(".now")) part.classList.remove("now");
  for (const part of [next.previousElementSibling, next, change, change?.nextElementSibling]) part?.classList.add("now");
  next.focus({ preventScroll: true });
  next.scrollIntoView();
  history.replaceState(null, "", `#${next.id}`); // a link to this change, to be copied
  const [number, count] = next.ariaLabel.match(/\d+/g);
  if (page) one("#count").textContent = `${number} of ${count}`;
}

function playing() {
  return page.classList.contains("playing");
}

function setPlaying(on) { // one change at a time, or all
  page.classList.toggle("playing", on);
  one('[data-key="o"]').ariaPressed = on;
}

function play() {
  if (!page) return;
  setPlaying(!playing());
  visit(page.contains(stop) ? stop : one(".note"));
}

function stepPair(by) {
  if (!page) return;
  const links = all(".chips a");
  links[links.findIndex((link) => link.ariaCurrent) + by]?.click();
}

function fold() {
  const folds = all("details");
  const open = folds.some((part) => !part.open);
  for (const part of folds) part.open = open;
}

const unfolded = []; // to be printed
addEventListener("beforeprint", () => {
  unfolded.push(...all("details:not([open])"));
  for (const part of unfolded) part.open = true;
});
addEventListener("afterprint", () => { for (const part of unfolded.splice(0)) part.open = false; });

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
  o: play,
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
  for (const pair of all(".pair")) pair.dataset.column = columnOf(event.target) ?? "";
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.key) KEYS[button.dataset.key]();
  if (button?.matches("[data-copy]")) {
    wholeFile = decodeURIComponent(button.nextElementSibling.href.split(",")[1]); // the link to download it
    button.textContent = document.execCommand("copy") ? "copied" : "not copied";
    wholeFile = null;
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  }
  const line = event.target.closest("[data-n]");
  const gutter = line && parseFloat(getComputedStyle(line, "::before").width);
  if (line && event.clientX - line.getBoundingClientRect().left < gutter) {
    const pair = page ? shown : line.closest(".pair").id;
    const side = line.dataset.column === "first" ? "left-" : "";
    location = `${page ? "" : "index.html"}#${pair}:${side}L${line.dataset.n}`;
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
  for (const chip of all(".chips a")) chip.href = chip.hash;
  choose();
  addEventListener("hashchange", () => show(location.hash));
  show(location.hash);
}
