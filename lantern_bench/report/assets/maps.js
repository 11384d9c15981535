// The accepted length over the image: a heat map for each cell, all on one scale. Inferno rises in brightness, also in grey.
const INFERNO = ["#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4"].map((colour, place) => [place / 5, colour]);

const BUTTONS = 24; // pixels above all maps
const NAMES = 70; // pixels above a map, for the lines of its name

function mapValues(number) {
  if (!find("#maps-prompt").checked) return data.cells[number].map;
  const picture = pictureAt.get(`${state.row}/${number}`);
  // No step committed the first token; each step committed as many as its length.
  return picture && data.cells[number].drafts ? [null, ...picture.steps.flatMap((length) => Array(length).fill(length))] : null;
}

function drawMaps() {
  const maps = shownCells().map((number) => [number, mapValues(number)]).filter(([, values]) => values);
  const side = data.grid, width = find("#maps").clientWidth, isNarrow = width < 600;
  const across = isNarrow ? 2 : Math.min(6, Math.max(4, maps.length)), down = Math.ceil(maps.length / across);
  find("#no-maps").hidden = Boolean(maps.length);
  find("#maps-grid").hidden = !maps.length;
  if (!maps.length) return;
  // Beside the maps of a wide screen there is room for a bar, below those of a narrow one.
  const pixels = width / (isNarrow ? across : across + 1), title = { text: "tokens per step", side: "top" };
  const bar = isNarrow ? { title, orientation: "h", y: 0, yanchor: "top" } : { title };
  const layout = layoutOf({
    grid: { rows: down, columns: across, pattern: "independent", xgap: 0.08, ygap: NAMES / (pixels + NAMES) }, margin: { l: 4, r: 4, t: NAMES + BUTTONS, b: 4 },
    height: NAMES + BUTTONS + down * (pixels + NAMES), annotations: [],
    coloraxis: { cmin: 1, cmax: Math.max(1.5, ...maps.flatMap(([, values]) => values)), colorscale: INFERNO,
      colorbar: { thickness: 12, ...bar } },
  });
  const traces = maps.map(([number, values], place) => {
    const at = place ? place + 1 : "", name = data.cells[number].name, known = values.filter((value) => value !== null);
    layout[`xaxis${at}`] = { visible: false, constrain: "domain" };
    layout[`yaxis${at}`] = { visible: false, autorange: "reversed", scaleanchor: `x${at}`, constrain: "domain" };
    layout.annotations.push({ text: `${broken(name, 0.9 * pixels)}<br>mean ${mean(known).toFixed(2)}`, showarrow: false, align: "left", font: { size: 12 },
      xref: `x${at} domain`, yref: `y${at} domain`, x: 0, y: 1, xanchor: "left", yanchor: "bottom" });
    return {
      type: "heatmap", name, coloraxis: "coloraxis", xaxis: `x${at}`, yaxis: `y${at}`,
      z: Array.from({ length: side }, (_, row) => values.slice(row * side, (row + 1) * side)),
      hovertemplate: "row %{y}, column %{x}: %{z:.2f}<extra></extra>",
    };
  });
  draw("maps-grid", traces, layout);
}

function startMaps() {
  find("#maps-prompt").addEventListener("change", drawMaps);
  onChange(drawMaps);
}
