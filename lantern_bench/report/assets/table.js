// The summary: sorted by a head, filtered with everything else. What is missing stays at the end.
const table = find("#table");
for (const button of every("thead button", table)) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), column = Number(button.dataset.column);
    const down = head.getAttribute("aria-sort") === "none" ? column > 0 : head.getAttribute("aria-sort") === "ascending";
    for (const other of every("thead th", table)) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (row) => { const text = row.children[column].dataset.order; return text === "" ? null : Number(text); };
    const body = table.tBodies[0], sorted = [...body.rows].sort((a, b) => {
      const x = order(a), y = order(b);
      if (x === null || y === null) return (x === null) - (y === null);
      return down ? y - x : x - y;
    });
    body.append(...sorted);
  });
}
for (const button of every(".solo", table)) button.addEventListener("click", () => solo(Number(button.dataset.cell)));
onChange(() => {
  for (const row of table.tBodies[0].rows) row.classList.toggle("off", !state.shown.has(Number(row.dataset.cell)));
});
