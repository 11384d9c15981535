// Draw pictures and tables at once, charts as soon as their library is decompressed. `data-ready` marks the end.
readAddress();
changed();
const opened = unpackPlotly().then(startCharts).catch((reason) => {
  const note = find("#no-charts");
  note.hidden = false;
  note.textContent = typeof DecompressionStream === "undefined"
    ? "The charts need a browser of 2023 or later; tables and pictures are complete."
    : `The charts could not be drawn: ${reason.message}. Tables and pictures are complete.`;
});
opened.finally(() => {
  for (const link of every(".links a")) link.hidden = find(link.hash).hidden;
  document.documentElement.dataset.ready = Math.round(performance.now());
});
