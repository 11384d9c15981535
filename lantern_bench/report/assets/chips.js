// The cells at the top of the page: legend and filter in one.
const groups = every(".group").map((button) => ({ button, cells: JSON.parse(button.dataset.cells) }));

for (const { button, cells } of groups) button.addEventListener("click", () => only(cells));
for (const chip of every(".chip[data-cell]")) {
  chip.addEventListener("click", () => {
    const cell = Number(chip.dataset.cell), shown = new Set(state.shown);
    // From all of them the first click asks for one; the last one cannot be taken away.
    if (isAll() && data.cells.length > 1) return show([cell]);
    shown.has(cell) ? shown.delete(cell) : shown.add(cell);
    return shown.size ? show(shown) : showAll();
  });
}
onChange(() => {
  for (const { button, cells } of groups) button.setAttribute("aria-pressed", isShown(cells));
  for (const chip of every(".chip[data-cell]")) chip.setAttribute("aria-pressed", state.shown.has(Number(chip.dataset.cell)));
  find("#shown").textContent = isAll() ? `cells: ${data.cells.length}` : `cells: ${state.shown.size} of ${data.cells.length}`;
});

// On a phone the list begins with the modes alone.
for (const mode of every(".mode")) mode.open = !matchMedia("(max-width: 860px)").matches;

// A click beside the open list, and Escape, close it.
document.addEventListener("click", (event) => { if (!find("#cells").contains(event.target)) find("#cells").open = false; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") find("#cells").open = false; });

find("#theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("lantern-bench-theme", theme); } catch { /* a page from a file may not keep it */ }
  changed();
});
