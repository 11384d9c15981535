// Curves, drawn by Plotly over the page's data. Cells that are off stay as shadows, so that a curve keeps its place.
// Plotly's own menus choose what is drawn; the chips are the legend, as they filter tables, pictures and maps as well.
const AXES = { lengths: ["tokens committed by a step", "share of steps"], depth: ["depth", "acceptance rate"], position: ["position (tokens, row by row)", "acceptance rate"] };
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const chosen = { speed: 0, quality: 0, device: 0, parameter: 0 };
const GREY = "rgba(128,128,128,0.35)";

function ink(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function unique(values) { return [...new Set(values)]; }
function isShadow(cell) { return !state.shown.has(cell); }
function axis(title, more = {}) {
  return { title: { text: title, standoff: 8 }, gridcolor: ink("--rail"), linecolor: ink("--line"), zeroline: false, ticks: "outside", tickcolor: ink("--line"), automargin: true, ...more };
}
function layout(x, y, more = {}) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink("--soft") },
    margin: { l: 56, r: 16, t: 12, b: 44 }, showlegend: false, hovermode: "closest", xaxis: x, yaxis: y,
    hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") } }, ...more,
  };
}
// Dropdown menus above a plot, one for each list of texts with a choice; `names` are keys of `chosen`.
function withMenus(arrangement, lists) {
  const menus = Object.entries(lists).filter(([, texts]) => texts.length > 1);
  arrangement.margin.t += 36 * menus.length;
  arrangement.updatemenus = menus.map(([name, texts], place) => ({
    name, active: chosen[name], x: 0, xanchor: "left", y: 1, yanchor: "bottom", pad: { b: 6 + 36 * place }, showactive: false,
    bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") }, buttons: texts.map((label) => ({ label, method: "skip" })),
  }));
  return arrangement;
}
function whiskers(values, lows, highs, colour) {
  const length = (a, b) => (a === null || b === null ? 0 : Math.max(0, a - b));
  return { type: "data", symmetric: false, array: values.map((v, i) => length(highs[i], v)), arrayminus: values.map((v, i) => length(v, lows[i])), thickness: 1.2, width: 3, color: colour };
}
function draw(id, traces, arrangement) {
  const plot = find(`#${id}`);
  Plotly.react(plot, traces, arrangement, CONFIG);
  if (!plot.dataset.listens) {
    plot.dataset.listens = "yes";
    plot.on("plotly_buttonclicked", (event) => { chosen[event.menu.name] = event.active; drawCharts(); });
    plot.on("plotly_click", (event) => { const cell = event.points[0].customdata; if (cell !== undefined) solo(cell); });
  }
}

// Names at the points, each where it covers neither a point nor another name; where there are many, those on the front.
const PLACES = [[9, -11, "left"], [9, 11, "left"], [-9, -11, "right"], [-9, 11, "right"], [9, -27, "left"], [9, 27, "left"], [-9, -27, "right"], [-9, 27, "right"]];

function overlaps(a, b) { return a.x0 < b.x1 && b.x0 < a.x1 && a.y0 < b.y1 && b.y0 < a.y1; }

function frontNames(front, frame) {
  const at = (point) => [frame.xaxis.l2p(point.x[0]), frame.yaxis.l2p(point.y[0])];
  const taken = front.points.map((point) => { const [x, y] = at(point); return { x0: x - 7, x1: x + 7, y0: y - 7, y1: y + 7 }; });
  const few = front.points.length <= 12;
  const named = front.points.filter((point) => (few || !point.dominated) && !isShadow(point.cell)).sort((a, b) => a.dominated - b.dominated || a.x[0] - b.x[0]);
  return named.map((point) => {
    const name = data.cells[point.cell].name, width = 6.7 * name.length + 4, [x, y] = at(point);
    const box = ([right, down, anchor]) => { const x0 = anchor === "left" ? x + right : x + right - width; return { x0, x1: x0 + width, y0: y + down - 8, y1: y + down + 8 }; };
    const inside = (one) => one.x0 >= 0 && one.x1 <= frame.xaxis._length && one.y0 >= 0 && one.y1 <= frame.yaxis._length;
    const place = PLACES.find((one) => inside(box(one)) && !taken.some((other) => overlaps(box(one), other))) || PLACES[0];
    taken.push(box(place));
    return { x: point.x[0], y: point.y[0], text: name, showarrow: false, xanchor: place[2], xshift: place[0], yshift: -place[1], font: { size: 12, color: ink(point.dominated ? "--soft" : "--ink") } };
  });
}

// The front with the speedups predicted for the chosen device, as they are where none is chosen.
function onDevice(front, device) {
  if (!device) return front;
  const known = front.points.filter((point) => device.speedups[point.cell] !== null).map((point) => ({ ...point, x: [device.speedups[point.cell], null, null] }));
  const quality = (point) => (front.less ? -point.y[0] : point.y[0]);
  const rivals = (a, b) => ["run", "model"].every((name) => data.cells[a.cell][name] === data.cells[b.cell][name]);
  const beats = (a, b) => rivals(a, b) && a.x[0] >= b.x[0] && quality(a) >= quality(b) && (a.x[0] > b.x[0] || quality(a) > quality(b));
  return { ...front, points: known.map((point) => ({ ...point, dominated: known.some((other) => beats(other, point)) })) };
}

function drawFront() {
  const speeds = unique(data.fronts.map((one) => one.speed)), qualities = unique(data.fronts.map((one) => one.axis));
  const measured = data.fronts.find((one) => one.speed === speeds[chosen.speed] && one.axis === qualities[chosen.quality]);
  if (!measured) return;
  const places = measured.speed === "speedup" ? data.devices : [], device = places[chosen.device - 1], front = onDevice(measured, device);
  const best = front.points.filter((point) => !point.dominated).sort((a, b) => a.x[0] - b.x[0]);
  const line = { x: best.map((p) => p.x[0]), y: best.map((p) => p.y[0]), mode: "lines", line: { color: GREY, width: 1.5 }, hoverinfo: "skip" };
  const title = front.axis.replace("\n", " "), speed = device ? `speedup predicted for ${device.text}` : data.speeds[front.speed];
  const traces = front.points.map((point) => {
    const cell = data.cells[point.cell], colour = colourOf(cell), shadow = isShadow(point.cell);
    const fine = front.quality === "fid" ? 2 : 4;
    const ends = (v, digits) => (v[1] === null ? "" : ` [${figure(v[1], digits)}, ${figure(v[2], digits)}]`);
    return {
      x: [point.x[0]], y: [point.y[0]], customdata: [point.cell], mode: "markers",
      marker: { symbol: cell.marker + (point.dominated ? "-open" : ""), size: 12, color: colour, line: { width: point.dominated ? 2 : 0, color: colour } },
      error_x: whiskers([point.x[0]], [point.x[1]], [point.x[2]], colour), error_y: whiskers([point.y[0]], [point.y[1]], [point.y[2]], colour),
      opacity: shadow ? 0.12 : point.dominated ? 0.5 : 1,
      hovertemplate: `<b>${cell.name}</b><br>${speed}: ${figure(point.x[0], 2)}${ends(point.x, 2)}<br>${title.split(",")[0]}: ${figure(point.y[0], fine)}${ends(point.y, fine)}${point.dominated ? "<br>dominated" : ""}<extra></extra>`,
    };
  });
  const direction = front.less ? "reversed" : true;
  const arrangement = layout(axis(device ? `${speed}, not measured` : `${speed}, 95 % interval`), axis(front.axis.replace("\n", "<br>"), { autorange: direction }));
  if (front.speed === "speedup") arrangement.shapes = [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: GREY, width: 1, dash: "dot" } }];
  draw("front", [line, ...traces], withMenus(arrangement, { speed: speeds.map((one) => data.speeds[one]), quality: qualities.map((one) => one.replace("\n", " ")), device: ["measured", ...places.map((one) => `predicted: ${one.text}`)] }));
  Plotly.relayout("front", { annotations: frontNames(front, find("#front")._fullLayout) });
}

function drawLines(id, more = {}) {
  const [x, y] = AXES[id];
  const traces = data[id].map((line) => {
    const cell = data.cells[line.cell], colour = colourOf(cell);
    return {
      x: line.x, y: line.y, customdata: line.x.map(() => line.cell), mode: "lines+markers", name: cell.name, opacity: isShadow(line.cell) ? 0.1 : 1,
      line: { color: colour, dash: cell.dash, width: id === "position" ? 1.4 : 2 }, marker: { symbol: cell.marker, size: id === "position" ? 5 : 8, color: colour },
      // Whiskers of many curves along the image would hide them; there they show for a few cells.
      error_y: id === "position" && state.shown.size > 2 ? undefined : whiskers(line.y, line.low, line.high, colour),
      hovertemplate: `<b>${cell.name}</b><br>${x.split(" (")[0]} %{x}: %{y:.3f}<extra></extra>`,
    };
  });
  draw(id, traces, layout(axis(x, id === "position" ? {} : { dtick: 1 }), axis(y, { rangemode: "tozero", ...more })));
}

function drawBound() {
  const bound = data.bounds[chosen.parameter];
  find("#bound-figure").hidden = !bound;
  if (!bound) return;
  const traces = bound.lines.map((line) => {
    const last = line.cells[line.cells.length - 1], cell = data.cells[last], colour = colourOf(cell), values = line.y.map((v) => v[0]);
    return {
      x: line.x, y: values, customdata: line.cells, mode: "lines+markers", line: { color: colour, dash: cell.dash, width: 2 }, opacity: line.cells.every(isShadow) ? 0.1 : 1,
      marker: { symbol: line.cells.map((number) => data.cells[number].marker), size: 9, color: colour },
      error_y: whiskers(values, line.y.map((v) => v[1]), line.y.map((v) => v[2]), colour), text: line.cells.map((number) => data.cells[number].name),
      hovertemplate: "<b>%{text}</b><br>mean accepted length %{y:.3f}<extra></extra>",
    };
  });
  const arrangement = layout(axis(bound.name, bound.parameter === "tree" ? { type: "category" } : { tickvals: [...new Set(bound.lines.flatMap((line) => line.x))] }), axis("mean accepted length"));
  draw("bound", traces, withMenus(arrangement, { parameter: data.bounds.map((one) => one.name) }));
}

function drawCharts() { drawFront(); drawLines("depth", { range: [0, 1.02] }); drawLines("lengths"); drawLines("position"); drawBound(); }

function startCharts() {
  find("#front").closest("figure").hidden = !data.fronts.length;
  for (const id of ["depth", "lengths", "position"]) find(`#${id}`).closest("figure").hidden = !data[id].length;
  drawCharts();
  onChange(drawCharts);
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
