// The chips above the page: legend and filter in one.
for (const chip of every(".chip[data-cell]")) {
  chip.addEventListener("click", () => {
    const cell = Number(chip.dataset.cell), shown = new Set(state.shown);
    // From all of them the first click asks for one; the last one cannot be taken away.
    if (isAll() && data.cells.length > 1) return show([cell]);
    shown.has(cell) ? shown.delete(cell) : shown.add(cell);
    return shown.size ? show(shown) : showAll();
  });
}
find("#all").addEventListener("click", showAll);
onChange(() => {
  for (const chip of every(".chip[data-cell]")) chip.setAttribute("aria-pressed", state.shown.has(Number(chip.dataset.cell)));
  find("#all").disabled = isAll();
});

find("#theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("lantern-bench-theme", theme); } catch { /* a page from a file may not keep it */ }
  changed();
});
