// Charts as the page's data describes them, drawn by Plotly in the colours of the theme. The chips are the legend: cells
// that are off stay as shadows, so that a curve keeps its place.
// Only these buttons, and no server: one that the library adds may send the chart away.
const CONFIG = { displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
const SPOTS = [["top right", 1, -1], ["bottom right", 1, 1], ["top left", -1, -1], ["bottom left", -1, 1], ["top center", 0, -1], ["bottom center", 0, 1]];
const TITLE = 12.5; // pixels, the size of the titles of axes
const GREY = "rgba(128,128,128,0.35)";
const MOST = 16; // curves that a chart can show side by side

// The cells that no other one beats in the first chart. Of many curves, only theirs are in full colour.
const onFront = new Set((data.figures.front[0]?.data || []).filter((trace) => trace.opacity === 1).flatMap((trace) => trace.customdata));
function isBehind(cells) { return state.shown.size > MOST && onFront.size > 0 && !cells.some((cell) => onFront.has(cell)); }

function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function penOf(size) {
  const pen = element("canvas").getContext("2d");
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen;
}

// A title in lines that are at most so many pixels long; what is in parentheses stays together.
function broken(title, length) {
  const pen = penOf(TITLE), lines = [""];
  for (const word of title.replace("<br>", " <br>").match(/\S*\([^)]*\)\S*|\S+/g)) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (word.startsWith("<br>") || pen.measureText(longer).width > length) lines.push(word.replace("<br>", ""));
    else lines[lines.length - 1] = longer;
  }
  return lines.filter(Boolean).join("<br>");
}

function themed(axis, length) {
  const title = { standoff: 8, font: { size: TITLE }, text: broken(axis.title.text, length) };
  return { gridcolor: ink("--rail"), linecolor: ink("--line"), tickcolor: ink("--line"), zeroline: false, ticks: "outside", automargin: true, ...axis, title };
}

function layoutOf(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink("--soft") },
    margin: { l: 56, r: 16, t: 12, b: 44 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("--soft"), activecolor: ink("--accent") },
    hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") } },
    ...more,
  };
}

// A line of cells has the colour of its last one; the line that joins a front belongs to none.
function traceOf(trace) {
  const cells = trace.customdata;
  if (!cells.length) return { ...trace, line: { color: GREY, width: 1.5 } };
  const colour = colourOf(data.cells[cells.at(-1)]), shown = cells.some((cell) => state.shown.has(cell));
  const isPale = !shown || (trace.mode !== "markers" && isBehind(cells));
  const whiskers = (ends) => ends && { ...ends, color: colour, thickness: 1.2, width: 3 };
  return {
    ...trace, opacity: isPale ? Math.min(trace.opacity, shown ? 0.2 : 0.1) : trace.opacity, meta: shown ? trace.text : undefined,
    line: { ...trace.line, color: colour }, marker: { ...trace.marker, color: colour },
    error_x: whiskers(trace.error_x), error_y: whiskers(trace.error_y),
  };
}

function draw(id, traces, layout) {
  const plot = find(`#${id}`), isNew = !plot.data;
  Plotly.react(plot, traces, layout, CONFIG).then(() => placeNames(plot));
  if (!isNew) return;
  plot.on("plotly_afterplot", () => placeNames(plot));
  // A click shows the cell of that point alone.
  plot.on("plotly_click", (event) => { const cell = event.points[0].customdata; if (cell !== undefined) only([cell]); });
}

// The name of a cell, then what is left of it where there is less room: without the output; on the front, mode and last setting, or the mode.
function shortened({ meta, opacity }) {
  const words = meta.replace(/ \((lossless|relaxed)\)$/, "").split(" "), mode = words.findIndex((word) => !word.endsWith(":"));
  const short = words.slice(0, mode + 1).join(" "), last = words.slice(mode + 1).at(-1) || "";
  return opacity === 1 ? [meta, words.join(" "), `${short} ${last}`.trim(), short] : [meta, words.join(" ")];
}

// A name stands where it covers no point and no other name, the fastest of the front first; others are left out. Names of
// cells behind the front would fill a narrow chart.
function placeNames(plot) {
  const { xaxis, yaxis } = plot._fullLayout, pen = penOf(12), isNarrow = xaxis._length < 500;
  const names = [...plot.data.entries()].filter(([, trace]) => trace.meta).map(([index, trace]) => ({ index, trace, x: xaxis.d2p(trace.x[0]), y: yaxis.d2p(trace.y[0]) }));
  const taken = names.map(({ x, y }) => [x - 5, y - 5, x + 5, y + 5]);
  const isFree = ([left, top, right, bottom]) => left >= 0 && top >= 0 && right <= xaxis._length && bottom <= yaxis._length
    && !taken.some((box) => left < box[2] && right > box[0] && top < box[3] && bottom > box[1]);
  for (const name of names.sort((a, b) => b.trace.opacity - a.trace.opacity || b.x - a.x)) {
    const wanted = name.trace.opacity < 1 && isNarrow ? [] : shortened(name.trace);
    const boxes = wanted.flatMap((text) => SPOTS.map(([spot, across, down]) => {
      const width = pen.measureText(text).width, left = name.x + across * 5 + (across - 1) * width / 2, top = name.y + down * 12 - 7;
      return [left, top, left + width, top + 14, spot, text];
    }));
    taken.push(boxes.find(isFree) || []);
    [name.spot, name.text] = [...taken.at(-1).slice(4), "top right", ""];
  }
  const moved = names.filter(({ trace, spot, text }) => trace.text !== text || trace.textposition !== spot);
  const changes = { mode: moved.map(({ text }) => (text ? "markers+text" : "markers")), textposition: moved.map(({ spot }) => spot), text: moved.map(({ text }) => text) };
  if (moved.length) Plotly.restyle(plot, changes, moved.map(({ index }) => index));
}

function drawFigure(id) {
  const chart = data.figures[id][find(`#${id}-menu`).value], axes = chart.layout, plot = find(`#${id}`);
  // The library takes the height of its place when the window changes.
  if (axes.height) plot.style.height = `${axes.height}px`;
  // An axis is shorter than its chart by the labels of the other one; names of groups are long.
  const xaxis = themed(axes.xaxis, (axes.height ? 0.4 : 0.7) * plot.clientWidth), yaxis = themed(axes.yaxis, 0.5 * plot.clientHeight);
  draw(id, chart.data.map(traceOf), layoutOf({ ...axes, xaxis, yaxis }));
}

function drawCharts() { for (const id of Object.keys(data.figures)) if (data.figures[id].length) drawFigure(id); }

function startCharts() {
  for (const [id, charts] of Object.entries(data.figures)) {
    const menu = find(`#${id}-menu`);
    menu.replaceChildren(...charts.map((chart, number) => element("option", { value: number }, chart.title)));
    menu.parentElement.hidden = charts.length < 2;
    menu.addEventListener("change", () => drawFigure(id));
    menu.closest("figure").hidden = !charts.length;
  }
  find("#charts").hidden = every("#charts figure").every((figure) => figure.hidden);
  onChange(drawCharts);
  matchMedia("(max-width: 860px)").addEventListener("change", changed);
  if (data.grid) startMaps();
  changed();
}

// The page holds Plotly's library compressed to a third of its size; the browser decompresses it.
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(find("#plotly").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(stream).text()));
}
