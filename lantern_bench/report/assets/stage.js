// One prompt through the modes: a slider over the cells that are on, with the picture's own figures.
const stage = { at: 0, cell: null };

function stageCells() { return shownCells().filter((number) => pictureAt.has(`${state.row}/${number}`)); }

function stageFacts(picture, cell) {
  const pairs = [["tokens per step", figure(picture.length, 2)], ["steps", String(picture.steps.length)], ["seconds", figure(picture.seconds, 3)], ...scoresOf(picture)];
  if (cell.run && new Set(data.cells.map((c) => c.run)).size > 1) pairs.push(["run", cell.run]);
  return pairs.filter(([, text]) => text !== "").map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text)));
}

function drawStrip(cells) {
  find("#stage-strip").replaceChildren(...cells.map((number, place) => {
    const picture = pictureAt.get(`${state.row}/${number}`), name = data.cells[number].name;
    const button = element("button", { type: "button", title: name, "aria-label": name, tabindex: "-1", "aria-current": String(place === stage.at) }, element("img", { src: source(picture), alt: "" }));
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
  if (!cells.length) { find("#stage-name").textContent = "no picture of this prompt in the cells shown"; find("#stage-facts").replaceChildren(); find("#stage-picture").hidden = true; return; }
  const number = cells[stage.at], cell = data.cells[number], picture = pictureAt.get(`${state.row}/${number}`), image = find("#stage-picture");
  stage.cell = number;
  slider.setAttribute("aria-valuetext", cell.name);
  image.hidden = picture.thumb === null;
  image.src = source(picture);
  image.alt = `${prompt}, ${cell.name}`;
  picture.file ? find("#stage-link").setAttribute("href", encodeURI(picture.file)) : find("#stage-link").removeAttribute("href");
  find("#stage-link").setAttribute("aria-label", `Picture file: ${image.alt}`);
  find("#stage-name").replaceChildren(glyphOf(number), cell.name);
  find("#stage-facts").replaceChildren(...stageFacts(picture, cell));
}

function goTo(row) { state.row = (row + rows.length) % rows.length; changed(); }

find("#stage-select").replaceChildren(...rows.map((row, number) => element("option", { value: number }, data.prompts[row.prompt] + (row.repeat ? ` (repeat ${row.repeat})` : ""))));
find("#stage-select").addEventListener("change", (event) => goTo(Number(event.target.value)));
find("#stage-before").addEventListener("click", () => goTo(state.row - 1));
find("#stage-after").addEventListener("click", () => goTo(state.row + 1));
find("#stage-slider").addEventListener("input", (event) => { stage.at = Number(event.target.value); stage.cell = stageCells()[stage.at]; drawStage(); });
onChange(drawStage);
