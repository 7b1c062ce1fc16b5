"use strict";

const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const root = document.documentElement;
const page = one("#data").textContent ? JSON.parse(one("#data").textContent) : null; // a helper's page has no pairs
const storage = (() => { try { return localStorage; } catch { return {}; } })(); // blocked: nothing is remembered

// ------------------------------------------------------------------------ a pair of scripts: as pair_html in pages.py

function wrapped(html, ranges, opening, closing) {
  let out = "", position = 0, inside = false;
  for (const piece of html.match(/<[^>]*>|&\w+;|./gu) ?? []) {
    const wanted = piece[0] !== "<" && ranges.some(([start, end]) => start <= position && position < end);
    if (wanted !== inside) out += wanted ? opening : closing;
    out += piece;
    inside = wanted;
    if (piece[0] !== "<") position += 1;
  }
  return out + (inside ? closing : "");
}

function lineOf(script, number) {
  return page.lines[script.lines[number - 1]];
}

function cell(tag, side, number, html, hidden = false) {
  const indent = html.length - html.trimStart().length;
  const attributes = `data-${side}="${number}" style="--i:${indent}"${hidden ? ' aria-hidden="true"' : ""}`;
  return `<${tag} ${attributes}>${hidden ? html.replaceAll("<a ", '<a tabindex="-1" ') : html}\n</${tag}>`;
}

class Columns {
  constructor(left, right) {
    Object.assign(this, { left, right, i: 0, j: 0 });
  }

  old(tag, marks, hidden) {
    this.i += 1;
    return cell(tag, "l", this.i, wrapped(lineOf(this.left, this.i), marks, "<mark>", "</mark>"), hidden);
  }

  new(tag, marks) {
    this.j += 1;
    return cell(tag, "r", this.j, wrapped(lineOf(this.right, this.j), marks, "<mark>", "</mark>"));
  }

  row(row) {
    if (typeof row === "number") {
      const equal = () => `<div class="row equal">${this.old("code", [], true)}${this.new("code", [])}</div>`;
      return Array.from({ length: row }, equal).join("");
    }
    if (row === "-") return `<div class="row">${this.old("del", [])}<i></i></div>`;
    if (row === "+") return `<div class="row"><i></i>${this.new("ins", [])}</div>`;
    return `<div class="row">${this.old("del", row[0])}${this.new("ins", row[1])}</div>`;
  }

  fold(count) {
    const inside = ([line]) => this.j < line && line <= this.j + count;
    const names = this.right.definitions.filter(inside).map(([, name]) => name);
    const within = names.length ? `: <code>${names.join(", ")}</code>` : "";
    return `<details><summary>${count} equal lines${within}</summary>${this.row(count)}</details>`;
  }
}

function head(side, script) {
  const copy = `<button class="needs-script" data-copy="${side}" aria-label="Copy ${script.path}">copy</button>`;
  const load = `<a download="${script.path.split("/").pop()}" href="#" aria-label="Download ${script.path}">download</a>`;
  return `<div class="head"><strong>${script.path}</strong> ${copy} ${load}</div>`;
}

function pairOf(left, right) { // it is stored in one direction only
  const stored = page.pairs[`${left}..${right}`];
  if (stored) return stored;
  const { parts, added, removed, notes } = page.pairs[`${right}..${left}`];
  const turned = (row) => (Array.isArray(row) ? [row[1], row[0]] : { "+": "-", "-": "+" }[row] ?? row);
  const other = parts.map((part) => (Array.isArray(part) ? part.map(turned) : part));
  return { parts: other, added: removed, removed: added, notes };
}

function pairHTML(leftName, rightName) {
  const [left, right] = [page.scripts[leftName], page.scripts[rightName]];
  const { parts, added, removed, notes } = pairOf(leftName, rightName);
  const measured = [left, right].filter((script) => script.buys).map((script) => `${script.path} ${script.buys}`);
  const times = measured.length ? ` Measured: ${measured.join("; ")}.` : "";
  const adds = right.adds ? `${right.adds}. ` : "";
  let html = `<h2>${left.path} → ${right.path}</h2>`;
  html += `<p class="about">${adds}<b>+${added} −${removed}</b> lines.${times}</p>`;
  html += `<div class="heads">${head("l", left)}${head("r", right)}</div>`;
  const columns = new Columns(left, right);
  let number = 0;
  html += '<div class="between">';
  for (const part of parts) {
    if (typeof part === "number") html += columns.row(part);
    else if (typeof part === "string") html += columns.fold(Number(part));
    else {
      const why = notes[number].map((note) => `<p>${page.whys[note]}</p>`).join("");
      number += 1;
      const title = `<h3 id="change${number}">Change ${number} of ${notes.length}</h3>`;
      html += `</div><div class="note" role="group" tabindex="-1" aria-labelledby="change${number}">${title}${why}</div>`;
      html += `<div class="change">${part.map((row) => columns.row(row)).join("")}</div><div class="between">`;
    }
  }
  return `${html}</div>`;
}

// ------------------------------------------------------------------------------------------- which pair, and which line

let shown = page ? page.first : ""; // it stands in the page from the beginning

function show(hash) { // #mnist_ddp..mnist_amp:L33, or :left-L33 for a line of the left script
  const [, left, right, side, line] = /^#(\w+)\.\.(\w+)(?::(left-)?L(\d+))?$/.exec(hash) ?? [];
  if (!left && hash) return; // an anchor
  const [from, to] = left ? [left, right] : page.first.split("..");
  const unknown = [from, to].find((name) => !page.scripts[name]);
  if (unknown || from === to) {
    one(".said").textContent = unknown ? `There is no script ${unknown}.` : "Choose two different scripts.";
    return;
  }
  if (`${from}..${to}` !== shown) {
    shown = `${from}..${to}`;
    one("#pair").innerHTML = pairHTML(from, to);
    one(".said").textContent = "";
  }
  choose(from, to);
  if (line) goTo(one(`[data-${side ? "l" : "r"}="${line}"]`));
}

function choose(from, to) {
  one("#left").value = from;
  one("#right").value = to;
  document.title = `${from} → ${to}: ddp-by-diff`;
  for (const chip of all(".chips a")) {
    if (chip.hash === `#${from}..${to}`) chip.setAttribute("aria-current", "true");
    else chip.removeAttribute("aria-current");
  }
}

function goTo(line) {
  for (const before of all(".here")) before.classList.remove("here");
  if (!line) return;
  if (line.closest("details")) line.closest("details").open = true;
  line.classList.add("here");
  line.scrollIntoView({ block: "center" });
}

function step(stops, by) { // to the next change, or function, below the top of the window
  const here = stops.indexOf(document.activeElement.closest(".note, .definition"));
  const next = here < 0 && by < 0 ? null : stops[here + by];
  next?.focus();
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
  j: () => step(all(".note, .definition"), 1),
  k: () => step(all(".note, .definition"), -1),
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

function textOf(side) {
  return all(`[data-${side}]`).map((cell) => cell.textContent).join("");
}

function sideOf(node) {
  const cell = (node.nodeType === Node.TEXT_NODE ? node.parentElement : node).closest("[data-l], [data-r]");
  return cell && (cell.dataset.l ? "l" : "r");
}

function copied(selection) { // the file's text, folded lines included
  const range = selection.getRangeAt(0);
  const side = selection.anchorNode && sideOf(selection.anchorNode);
  const cells = side ? all(`[data-${side}]`).filter((cell) => range.intersectsNode(cell)) : [];
  if (!cells.length) return null;
  const part = document.createRange();
  return cells.map((cell) => {
    part.selectNodeContents(cell);
    if (cell.contains(range.startContainer)) part.setStart(range.startContainer, range.startOffset);
    if (cell.contains(range.endContainer)) part.setEnd(range.endContainer, range.endOffset);
    return part.toString();
  }).join("");
}

document.addEventListener("copy", (event) => {
  const text = wholeFile ?? copied(getSelection());
  if (text !== null) {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  }
});

document.addEventListener("mousedown", (event) => {
  const side = sideOf(event.target);
  if (page && side) one("#pair").dataset.side = side;
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button, [download]");
  if (button?.dataset.key) KEYS[button.dataset.key]();
  if (button?.dataset.copy) {
    wholeFile = textOf(button.dataset.copy);
    button.textContent = document.execCommand("copy") ? "copied" : "not copied";
    wholeFile = null;
  }
  if (button?.download) {
    const side = button.parentElement.querySelector("[data-copy]").dataset.copy;
    button.href = `data:text/x-python;charset=utf-8,${encodeURIComponent(textOf(side))}`;
  }
  const cell = event.target.closest("[data-l], [data-r]");
  const gutter = cell && parseFloat(getComputedStyle(cell, "::before").width);
  if (page && cell && event.clientX - cell.getBoundingClientRect().left < gutter) {
    location.hash = `${shown}:${cell.dataset.l ? `left-L${cell.dataset.l}` : `L${cell.dataset.r}`}`;
  }
});

// ---------------------------------------------------------------------------------------------------------------- start

setTheme(root.dataset.theme || "system");
one("#keys-on").checked = storage["ddp-by-diff keys"] !== "off";
one("#keys-on").addEventListener("change", (event) => {
  storage["ddp-by-diff keys"] = event.target.checked ? "on" : "off";
});
if (page) {
  for (const list of all("select")) {
    list.addEventListener("change", () => { location.hash = `${one("#left").value}..${one("#right").value}`; });
  }
  addEventListener("hashchange", () => show(location.hash));
  show(location.hash);
}
