// The accepted length over the image, on one scale for all cells. Inferno's colours rise in brightness, also in grey.
const RAMP = [[0, 0, 4], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];
const shared = data.cells.flatMap((cell) => cell.map || []).filter((value) => value !== null);
const scale = { low: 1, high: Math.max(1.5, ...shared) };
const longestStep = Math.max(2, ...data.lengths.flatMap((line) => line.x));

function heat(value, low = scale.low, high = scale.high) {
  const place = Math.min(1, Math.max(0, (value - low) / (high - low))) * (RAMP.length - 1), start = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[start].map((part, i) => Math.round(part + (RAMP[start + 1][i] - part) * (place - start)));
}

function paint(canvas, values, high = scale.high) {
  const side = data.grid, context = canvas.getContext("2d");
  canvas.width = canvas.height = side;
  const pixels = context.createImageData(side, side);
  values.forEach((value, place) => pixels.data.set(value === null ? [128, 128, 128, 60] : [...heat(value, 1, high), 255], 4 * place));
  context.putImageData(pixels, 0, 0);
}

function mapValues(number) {
  if (!find("#maps-prompt").checked) return data.cells[number].map;
  const picture = pictureAt.get(`${state.row}/${number}`);
  return picture && picture.runs ? [...picture.runs].map((digit) => parseInt(digit, 36) || null) : null;
}

function mapFigure(number, values, high) {
  const cell = data.cells[number], canvas = document.createElement("canvas"), known = values.filter((value) => value !== null);
  paint(canvas, values, high);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${cell.name}: tokens per step from ${Math.min(...known).toFixed(2)} to ${Math.max(...known).toFixed(2)}, mean ${mean(known).toFixed(2)}`);
  canvas.addEventListener("pointermove", (event) => {
    const column = Math.min(data.grid - 1, Math.floor((event.offsetX / canvas.clientWidth) * data.grid)), row = Math.min(data.grid - 1, Math.floor((event.offsetY / canvas.clientHeight) * data.grid));
    const value = values[row * data.grid + column];
    find("#maps-readout").textContent = `${cell.name}, row ${row + 1}, column ${column + 1}: ${value === null || value === undefined ? "the first token" : value.toFixed(2)}`;
  });
  const caption = element("figcaption", {}, glyphOf(number), element("span", {}, cell.name), element("small", {}, `mean ${mean(known).toFixed(2)}`));
  return element("figure", {}, canvas, caption);
}

function drawMaps() {
  const found = shownCells().filter((number) => data.cells[number].drafts).map((number) => [number, mapValues(number)]).filter(([, values]) => values && values.some((v) => v !== null));
  const high = find("#maps-prompt").checked ? Math.max(1.5, ...found.flatMap(([, values]) => values.filter((v) => v !== null))) : scale.high;
  find("#scale-low").textContent = "1";
  find("#scale-high").textContent = high.toFixed(1);
  find("#maps-grid").style.setProperty("--across", Math.min(8, Math.max(4, found.length)));
  find("#maps-grid").replaceChildren(...found.map(([number, values]) => mapFigure(number, values, high)));
  if (!found.length) find("#maps-grid").append(element("p", { class: "lead" }, "None of the cells shown drafts anything."));
}

if (data.grid) {
  find("#maps-prompt").addEventListener("change", drawMaps);
  onChange(drawMaps);
}
