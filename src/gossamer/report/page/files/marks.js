// What all parts of a page draw with. Everything of a run is put into the page as text or as an attribute, never as markup.
"use strict";

const G = {};

G.SVG = "http://www.w3.org/2000/svg";
G.COLOURS = 8;
G.DASHES = ["", "7 3", "2 3", "8 3 2 3"];

// An element with attributes and children; a string child becomes text.
G.make = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  return G.fill(node, attributes, children);
};

G.mark = (name, attributes = {}, ...children) => {
  const node = document.createElementNS(G.SVG, name);
  return G.fill(node, attributes, children);
};

G.fill = (node, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

// All colours solid first, then dashed.
G.style = (place) => ({
  colour: `var(--c${place % G.COLOURS})`,
  dash: G.DASHES[Math.floor(place / G.COLOURS) % G.DASHES.length],
});

// A number in a few characters: 0.00123, 12.3k, 4.5M.
G.short = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    value = +value.toPrecision(3);  // 999,999 is 1M
    const power = Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), 5);
    return `${+(value / 1000 ** power).toPrecision(3)}${" kMGTP"[power]}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return `${+value.toPrecision(5)}`;
};

// The same with a unit, as "12.3 MB".
G.measure = (value, unit) => G.short(value).replace(/([kMGTP]?)$/, ` $1${unit}`);
G.bytes = (value) => G.measure(value, "B");
G.rate = (bps) => (bps === null ? "no limit" : G.measure(bps, "bit/s"));

G.seconds = (s) => {
  if (s === null || s === undefined) return "–";
  if (s < 120) return `${+s.toPrecision(3)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${+(s / 3600).toPrecision(3)} h` : `${+(s / 86400).toPrecision(3)} d`;
};

// Round numbers between two ends, about so many.
G.ticks = (low, high, about) => {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, about);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
};

G.logTicks = (low, high) => {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const k of [1, 2, 5]) if (k * 10 ** power >= low && k * 10 ** power <= high) found.push(k * 10 ** power);
  }
  return found.length > 8 ? found.filter((x) => Math.abs(Math.log10(x) - Math.round(Math.log10(x))) < 1e-9) : found;
};

// Puts text on the clipboard, also on a page that was opened as a file.
G.copy = async (text, button) => {
  const before = button.textContent;
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = G.make("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  button.textContent = done ? "copied" : "copy it from the field";
  setTimeout(() => { button.textContent = before; }, 1500);
};

// The numbers behind something, to read and to copy; made when they are asked for.
G.data = (rows) => {
  const area = G.make("textarea", { readonly: "", "aria-label": "the numbers, separated by tabs" });
  const text = () => rows().map((row) => row.map((cell) => (cell === null || cell === undefined ? "" : cell)).join("\t")).join("\n");
  const button = G.make("button", { type: "button", class: "small", onclick: () => G.copy(text(), button) }, "copy");
  const fold = G.make("details", { class: "tools", ontoggle: () => { if (fold.open) area.value = text(); } },
    G.make("summary", { class: "faint" }, "numbers"), button, area);
  return fold;
};
