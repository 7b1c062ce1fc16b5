"use strict";

// Sphinx's own search leads to the top of a page, and finds a pasted message only if the page has each of its words.
// This one ranks sections: a rare word of the query counts more than a common one, and words in the query's order count
// more than others.  A message is therefore found although its numbers and names are those of another run.

const SHOWN = 20; // results, at most
const LEAST = 0.25; // of the best result's points
const AROUND = 120; // characters on each side of the words that were found, at most

function tokens(text) { // each word without its ending, and its place
  return [...text.toLowerCase().matchAll(/[\p{L}\p{N}]+/gu)].map(({ 0: word, index }) => {
    const stem = word.length > 3 ? word.replace(/(ing|ed)$/, "").replace(/[es]+$/, "") : word;
    return { stem, start: index, end: index + word.length };
  });
}

const pair = ({ stem }, i, all) => `${stem} ${all[i + 1]?.stem}`;
const query = new URLSearchParams(location.search).get("q")?.trim() ?? "";
const wanted = tokens(query);
const entries = sections.map(([page, title, anchor, heading, text]) => {
  const inHeading = tokens(heading), inText = tokens(text);
  const stems = new Set([...inHeading, ...inText].map(({ stem }) => stem));
  const pairs = new Set([...inHeading.map(pair), ...inText.map(pair)]);
  const named = new Set(inHeading.map(({ stem }) => stem));
  return { page, title, anchor, heading, text, inText, stems, pairs, named };
});

const weights = new Map();
for (const { stem } of wanted) {
  const count = entries.filter(({ stems }) => stems.has(stem)).length;
  weights.set(stem, count ? Math.log(1 + entries.length / count) : 0);
}

function points({ stems, pairs, named }) {
  let sum = 0;
  for (const [stem, weight] of weights) if (stems.has(stem)) sum += named.has(stem) ? 2 * weight : weight;
  for (let i = 0; i + 1 < wanted.length; i++) {
    if (pairs.has(pair(wanted[i], i, wanted))) sum += weights.get(wanted[i].stem) + weights.get(wanted[i + 1].stem);
  }
  return sum;
}

function longestRun({ inText }) { // the place of the words that follow each other in the query, too
  let best = { weight: 0, start: 0, end: 0 };
  for (let i = 0; i < inText.length; i++) {
    for (let j = 0; j < wanted.length; j++) {
      let weight = 0, length = 0;
      while (inText[i + length] && inText[i + length].stem === wanted[j + length]?.stem) {
        weight += weights.get(inText[i + length].stem);
        length++;
      }
      if (weight > best.weight) best = { weight, start: inText[i].start, end: inText[i + length - 1].end };
    }
  }
  return best;
}

function address({ page, anchor, text }, { start, end }) { // of the words, if the page has them only once
  const words = text.slice(start, end);
  const whole = entries.filter((other) => other.page === page).map((other) => `${other.heading}\n${other.text}`);
  const isOne = words && !words.includes("\n") && whole.join("\n").split(words).length === 2;
  return `${page}.html#${anchor}${isOne ? `:~:text=${encodeURIComponent(words).replaceAll("-", "%2D")}` : ""}`;
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function excerpt({ text }, { start, end }) { // the line with the words; of a long one what is near them
  const before = text.slice(text.lastIndexOf("\n", start) + 1, start);
  const after = text.slice(end, `${text}\n`.indexOf("\n", end));
  const left = before.length > AROUND ? `… ${before.slice(-AROUND).replace(/^\S* /, "")}` : before;
  const right = after.length > AROUND ? `${after.slice(0, AROUND).replace(/ \S*$/, "")} …` : after;
  return element("p", {}, left, element("mark", {}, text.slice(start, end)), right);
}

function result(entry) {
  const run = longestRun(entry);
  const name = entry.heading === entry.title ? entry.title : `${entry.title} › ${entry.heading}`;
  return element("li", {}, element("a", { href: address(entry, run) }, name), excerpt(entry, run));
}

const ranked = entries.map((entry) => ({ entry, points: points(entry) })).sort((a, b) => b.points - a.points);
const shown = ranked.filter((one) => one.points > 0 && one.points >= LEAST * ranked[0].points).slice(0, SHOWN);
document.querySelector("#results").append(...shown.map(({ entry }) => result(entry)));
const found = shown.length ? `Results for: ${query}` : `No page has a word of: ${query}`;
document.querySelector("#found").textContent = query ? found : "Type words, or paste an error message.";
for (const input of document.querySelectorAll("input[name=q]")) input.value = query;
