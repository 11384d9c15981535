// One prompt through the modes: a slider over the cells that are on, with the picture's own figures.
const stage = { at: 0, cell: data.cells.findIndex((cell) => cell.drafts), view: "beside" };

function stageCells() { return shownCells().filter((number) => pictureAt.has(`${state.row}/${number}`)); }

function stageFacts(picture, cell) {
  const pairs = [["tokens per step", figure(picture.length, 2)], ["steps", String(picture.steps.length)], ["seconds", figure(picture.seconds, 3)], ["distance", cell.distance], ...scoresOf(picture)];
  if (cell.run && new Set(data.cells.map((c) => c.run)).size > 1) pairs.push(["run", cell.run]);
  return pairs.filter(([, text]) => text !== "").map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text)));
}

function drawFrame(frame, number, prompt) {
  const cell = data.cells[number], image = find("img", frame), picture = pictureAt.get(`${state.row}/${number}`);
  image.hidden = picture.thumb === null;
  image.src = source(picture);
  image.alt = `${prompt}, ${cell.name}`;
  find("figcaption", frame).textContent = cell.name;
}

// The picture of a cell, and that of its ar cell beside or over it; ar itself stands alone.
function drawFrames(number, prompt) {
  const { base } = data.cells[number], hasBase = base !== null && base !== number && pictureAt.has(`${state.row}/${base}`);
  find("#stage-frames").dataset.view = hasBase ? stage.view : "alone";
  drawFrame(find("#stage-cell"), number, prompt);
  if (hasBase) drawFrame(find("#stage-base"), base, prompt);
  for (const button of every(".screen [type=button]")) button.setAttribute("aria-pressed", button.dataset.view === stage.view);
}

function drawStrip(cells) {
  find("#stage-strip").replaceChildren(...cells.map((number, place) => {
    const picture = pictureAt.get(`${state.row}/${number}`), name = data.cells[number].name;
    const image = picture.thumb === null ? glyphOf(number) : element("img", { src: source(picture), alt: "" });
    const button = element("button", { type: "button", title: name, "aria-label": name, tabindex: "-1", "aria-current": String(place === stage.at) }, image);
    button.addEventListener("click", () => { stage.at = place; stage.cell = number; drawStage(); });
    return button;
  }));
}

function drawStage() {
  const cells = stageCells(), kept = cells.indexOf(stage.cell), slider = find("#stage-slider");
  find("#stage").hidden = !rows.length;
  if (!rows.length) return;
  stage.at = kept >= 0 ? kept : Math.min(stage.at, Math.max(0, cells.length - 1));
  slider.max = Math.max(0, cells.length - 1);
  slider.value = stage.at;
  slider.disabled = cells.length < 2;
  const row = rows[state.row], prompt = data.prompts[row.prompt];
  find("#stage-prompt").textContent = `“${prompt}”`;
  find("#stage-select").value = state.row;
  drawStrip(cells);
  find("#stage-frames").hidden = !cells.length;
  if (!cells.length) { find("#stage-name").textContent = "no picture of this prompt in the cells shown"; find("#stage-facts").replaceChildren(); return; }
  const number = cells[stage.at], cell = data.cells[number], picture = pictureAt.get(`${state.row}/${number}`);
  stage.cell = number;
  slider.setAttribute("aria-valuetext", cell.name);
  drawFrames(number, prompt);
  picture.file ? find("#stage-link").setAttribute("href", encodeURI(picture.file)) : find("#stage-link").removeAttribute("href");
  find("#stage-link").setAttribute("aria-label", `Picture file: ${prompt}, ${cell.name}`);
  find("#stage-name").replaceChildren(glyphOf(number), element("span", {}, ...wordsOf(cell.name)), ...[badgeOf(cell)].filter(Boolean));
  find("#stage-facts").replaceChildren(...stageFacts(picture, cell));
}

function goTo(row) { state.row = (row + rows.length) % rows.length; changed(); }

find("#stage-select").replaceChildren(...rows.map((_, number) => element("option", { value: number }, promptOf(number))));
find("#stage-select").addEventListener("change", (event) => goTo(Number(event.target.value)));
find("#stage-before").addEventListener("click", () => goTo(state.row - 1));
find("#stage-after").addEventListener("click", () => goTo(state.row + 1));
find("#stage-slider").addEventListener("input", (event) => { stage.at = Number(event.target.value); stage.cell = stageCells()[stage.at]; drawStage(); });
for (const button of every(".screen [type=button]")) button.addEventListener("click", () => { stage.view = button.dataset.view; drawStage(); });
find("#stage-swipe").addEventListener("input", (event) => find("#stage-frames").style.setProperty("--at", `${event.target.value}%`));
onChange(drawStage);
