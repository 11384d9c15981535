// Charts as the page's data describes them, drawn by Plotly in the colours of the theme. The chips are the legend: cells
// that are off stay as shadows, so that a curve keeps its place.
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const GREY = "rgba(128,128,128,0.35)";

function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function themed(axis) {
  const colours = { gridcolor: ink("--rail"), linecolor: ink("--line"), tickcolor: ink("--line") };
  return { ...colours, zeroline: false, ticks: "outside", automargin: true, ...axis, title: { standoff: 8, font: { size: 12.5 }, ...axis.title } };
}

function layoutOf(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink("--soft") },
    margin: { l: 56, r: 16, t: 12, b: 44 },
    hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") } },
    ...more,
  };
}

// A line of cells has the colour of its last one; the line that joins a front belongs to none.
function traceOf(trace) {
  const cells = trace.customdata;
  if (!cells.length) return { ...trace, line: { color: GREY, width: 1.5 } };
  const colour = colourOf(data.cells[cells[cells.length - 1]]), shown = cells.some((cell) => state.shown.has(cell));
  const whiskers = (ends) => ends && { ...ends, color: colour, thickness: 1.2, width: 3 };
  return {
    ...trace, opacity: shown ? trace.opacity : 0.1, text: shown ? trace.text : undefined,
    line: { ...trace.line, color: colour }, marker: { ...trace.marker, color: colour },
    error_x: whiskers(trace.error_x), error_y: whiskers(trace.error_y),
  };
}

function draw(id, traces, layout) {
  const plot = find(`#${id}`), isNew = !plot.data;
  Plotly.react(plot, traces, layout, CONFIG);
  // A click shows the cell of that point alone.
  if (isNew) plot.on("plotly_click", (event) => { const cell = event.points[0].customdata; if (cell !== undefined) solo(cell); });
}

function drawFigure(id) {
  const chart = data.figures[id][find(`#${id}-menu`).value], axes = chart.layout;
  draw(id, chart.data.map(traceOf), layoutOf({ ...axes, xaxis: themed(axes.xaxis), yaxis: themed(axes.yaxis) }));
}

function drawCharts() { for (const id of Object.keys(data.figures)) if (data.figures[id].length) drawFigure(id); }

function startCharts() {
  for (const [id, charts] of Object.entries(data.figures)) {
    const menu = find(`#${id}-menu`);
    menu.replaceChildren(...charts.map((chart, number) => element("option", { value: number }, chart.title)));
    menu.hidden = charts.length < 2;
    menu.addEventListener("change", () => drawFigure(id));
    menu.closest("figure").hidden = !charts.length;
  }
  drawCharts();
  onChange(drawCharts);
  if (data.grid) startMaps();
}

// The page holds Plotly's library compressed to a third of its size; the browser decompresses it.
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(find("#plotly").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  find("#plotly").remove();
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}
