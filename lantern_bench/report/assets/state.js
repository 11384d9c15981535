// What is shown: the cells that are on, the row of pictures on the stage, the order and the columns of the table. Each part
// of the page redraws when this changes.
const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector, root = document) => root.querySelector(selector);
const every = (selector, root = document) => [...root.querySelectorAll(selector)];
const listeners = [];
const state = { shown: new Set(data.cells.keys()), row: 0, sort: { name: "speedup", down: true }, allColumns: false };

function onChange(listener) { listeners.push(listener); }
function changed() { for (const listener of listeners) listener(); }
function isAll() { return state.shown.size === data.cells.length; }
function show(cells) { state.shown = new Set(cells); changed(); }
function showAll() { show(data.cells.keys()); }

function isShown(cells) { return state.shown.size === cells.length && cells.every((cell) => state.shown.has(cell)); }

// Some cells alone; asked for a second time, all of them again.
function only(cells) { isShown(cells) ? showAll() : show(cells); }

function isDark() { return document.documentElement.dataset.theme === "dark"; }
function colourOf(cell) { return isDark() ? cell.dark : cell.colour; }
function shownCells() { return [...state.shown].sort((a, b) => a - b); }

// A row of pictures is a prompt and a repeat; a picture is found by row and cell.
const rows = [], rowAt = new Map(), pictureAt = new Map();
for (const picture of data.pictures) {
  const key = `${picture.prompt}/${picture.repeat}`;
  if (!rowAt.has(key)) { rowAt.set(key, rows.length); rows.push({ prompt: picture.prompt, repeat: picture.repeat, lengths: [] }); }
  const row = rowAt.get(key);
  pictureAt.set(`${row}/${picture.cell}`, picture);
  picture.length = picture.steps.length ? mean(picture.steps) : null;
  if (data.cells[picture.cell].drafts && picture.length) rows[row].lengths.push(picture.length);
}

function source(picture) { return picture.thumb === null ? "" : `data:image/webp;base64,${data.thumbs[picture.thumb]}`; }
function promptOf(row) { return data.prompts[rows[row].prompt] + (rows[row].repeat ? ` (repeat ${rows[row].repeat})` : ""); }

// The scores of a picture: pairs of the metric and its figure. More digits would tell no two single pictures apart.
function scoresOf(picture) {
  const scored = Object.entries(data.metrics).filter(([name]) => picture[name] !== undefined);
  return scored.map(([name, label]) => [label, figure(picture[name], 2)]);
}
function figure(value, digits) { return value === null || value === undefined ? "" : value.toFixed(digits); }
function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value; else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
function badgeOf(cell) { return cell.output && element("span", { class: `badge ${cell.output}` }, cell.output); }
// A name that breaks between words only: browsers would also break it at hyphens.
function wordsOf(name) { return name.split(" ").flatMap((word) => [element("span", { class: "word" }, word), " "]); }
function glyphOf(number) { return find(`.chip[data-cell="${number}"] .glyph`).cloneNode(true); }
