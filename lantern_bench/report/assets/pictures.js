// The grid: a row for each prompt and repeat, a column for each cell that is on. Rows are made as they are asked for.
const STEP = 12;
const pages = { rows: STEP };
const longest = Math.max(1, ...data.pictures.map((picture) => picture.length || 0));

function mean(values) { return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0; }

function chosenRows() {
  const words = find("#search").value.toLowerCase().split(/\s+/).filter(Boolean), order = find("#order").value;
  const chosen = [...rows.keys()].filter((row) => words.every((word) => data.prompts[rows[row].prompt].toLowerCase().includes(word)));
  const sign = { plan: 0, hard: 1, easy: -1 }[order];
  return sign ? chosen.sort((a, b) => sign * (mean(rows[a].lengths) - mean(rows[b].lengths))) : chosen;
}

function pictureFigure(row, number) {
  const picture = pictureAt.get(`${row}/${number}`), cell = data.cells[number];
  if (!picture) return element("div", { class: "gone" }, "no picture");
  const prompt = data.prompts[picture.prompt];
  const image = picture.thumb === null ? element("div", { class: "gone" }, "file missing") : element("img", { src: source(picture), alt: `${prompt}, ${cell.name}`, decoding: "async" });
  const linked = picture.file ? element("a", { href: encodeURI(picture.file), target: "_blank", rel: "noopener", "aria-label": `Picture file: ${prompt}, ${cell.name}` }, image) : image;
  const fill = element("i", { style: `width:${((100 * (picture.length || 0)) / longest).toFixed(1)}%;--c:${cell.colour};--d:${cell.dark}` });
  const first = element("div", {}, element("b", {}, figure(picture.length, 2)), " tokens/step");
  const scores = scoresOf(picture).map(([label, text]) => element("div", {}, `${label} ${text}`));
  const seconds = picture.seconds ? element("div", {}, `${figure(picture.seconds, 2)} s`) : null;
  return element("figure", {}, linked, element("div", { class: "meter" }, fill), element("figcaption", {}, first, seconds, ...scores));
}

function gridRow(row, cells) {
  const button = element("button", { type: "button" }, "through the modes");
  button.addEventListener("click", () => { state.row = row; changed(); find("#stage").scrollIntoView(); find("#stage-slider").focus({ preventScroll: true }); });
  const head = element("th", { scope: "row" }, promptOf(row), element("div", {}, button));
  return element("tr", {}, head, ...cells.map((number) => element("td", {}, pictureFigure(row, number))));
}

function gridHead(number) {
  const cell = data.cells[number], distance = cell.distance ? element("small", {}, `distance ${cell.distance}`) : null;
  return element("th", { scope: "col" }, glyphOf(number), ...wordsOf(cell.name), badgeOf(cell), distance);
}

// The ar cells of the cells that are on, first the one of most of them.
function basesOf(cells) {
  const bases = cells.map((number) => data.cells[number].base).filter((base) => base !== null);
  const count = (base) => bases.filter((other) => other === base).length;
  return bases.sort((a, b) => count(b) - count(a));
}

// The cells of the columns; with ar pinned it comes first.
function gridCells() { return find("#pin").checked ? [...new Set([...basesOf(shownCells()), ...shownCells()])] : shownCells(); }

function drawGrid() {
  const cells = gridCells(), chosen = chosenRows(), drawn = chosen.slice(0, pages.rows);
  find("#grid").classList.toggle("pinned", find("#pin").checked);
  find("#grid").tHead.replaceChildren(element("tr", {}, element("td"), ...cells.map(gridHead)));
  find("#grid").tBodies[0].replaceChildren(...drawn.map((row) => gridRow(row, cells)));
  find("#count").textContent = `${drawn.length} of ${chosen.length} rows`;
  find("#more").hidden = drawn.length >= chosen.length;
}

find("#search").addEventListener("input", () => { pages.rows = STEP; drawGrid(); });
find("#order").addEventListener("change", () => { pages.rows = STEP; drawGrid(); });
find("#pin").addEventListener("change", drawGrid);
find("#more").addEventListener("click", () => { pages.rows += 2 * STEP; drawGrid(); });
find("#pictures").hidden = !rows.length;
onChange(drawGrid);
