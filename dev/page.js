"use strict";

const all = (selector) => [...document.querySelectorAll(selector)];
for (const { cells: [left, right] } of all(".equal")) {
  left.innerHTML = right.innerHTML;
  left.style.cssText = right.style.cssText;
}
const section = () => all("section").find((one) => one.checkVisibility());
const notes = () => [...section().querySelectorAll(".note")];

function here() { // the number of the change in the address, from 0; -1: none
  return notes().findIndex((note) => `#${note.id}` === decodeURI(location.hash));
}

function step(by) {
  const target = notes()[Math.max(0, here() + by)];
  if (target) location.hash = target.id;
}

function stepPair(by) {
  const links = all("li a");
  links[links.findIndex((link) => link.ariaCurrent) + by]?.click();
}

function fold() {
  const folds = [...section().querySelectorAll("td details")];
  const open = folds.some((one) => !one.open);
  for (const one of folds) one.open = open;
}

function theme() {
  const dark = getComputedStyle(document.body).backgroundColor !== "rgb(255, 255, 255)";
  localStorage.setItem("theme", dark ? "light" : "dark"); // the site's other pages keep theirs there, too
  keptTheme();
}

function keptTheme() {
  document.documentElement.style.colorScheme = (localStorage.getItem("theme") ?? "auto").replace("auto", "");
}

const KEYS = { j: () => step(1), k: () => step(-1), n: () => stepPair(1), p: () => stepPair(-1), f: fold, t: theme };

addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.altKey && Object.hasOwn(KEYS, event.key)) KEYS[event.key]();
});
for (const button of all("button")) button.addEventListener("click", KEYS[button.dataset.key]);

function show() {
  for (const link of all("li a")) link.ariaCurrent = link.hash === `#${section().id}` ? "true" : null;
  all("[role=status]")[0].textContent = here() < 0 ? `${notes().length} changes` : `${here() + 1} of ${notes().length}`;
}
addEventListener("hashchange", show);
addEventListener("load", show);
all(".bar")[0].hidden = false;
keptTheme();
