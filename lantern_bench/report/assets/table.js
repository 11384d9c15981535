// The summary: sorted by a head, filtered with everything else. What is missing stays at the end.
const table = find("#table"), heads = every("thead th", table);

function orderOf(row, column) {
  const text = row.children[column].dataset.order;
  return text === "" ? null : Number(text);
}

function sortRows() {
  const { name, down } = state.sort, column = heads.findIndex((head) => head.dataset.name === name);
  if (column < 0) return;
  const sorted = [...table.tBodies[0].rows].sort((a, b) => {
    const x = orderOf(a, column), y = orderOf(b, column);
    if (x === null || y === null) return (x === null) - (y === null);
    return down ? y - x : x - y;
  });
  table.tBodies[0].append(...sorted);
}

function drawTable() {
  const { name, down } = state.sort;
  for (const head of heads) head.setAttribute("aria-sort", head.dataset.name !== name ? "none" : down ? "descending" : "ascending");
  for (const row of table.tBodies[0].rows) row.hidden = !state.shown.has(Number(row.dataset.cell));
  table.classList.toggle("all-columns", state.allColumns);
  if (find("#all-columns")) find("#all-columns").checked = state.allColumns;
  sortRows();
}

// Names begin with the first one, figures with the largest.
function sortBy(name) {
  state.sort = { name, down: name === state.sort.name ? !state.sort.down : name !== "cell" };
  drawTable();
  writeAddress();
}

for (const head of heads) find("button", head).addEventListener("click", () => sortBy(head.dataset.name));
for (const button of every(".solo", table)) button.addEventListener("click", () => only([Number(button.dataset.cell)]));
find("#all-columns")?.addEventListener("change", (event) => { state.allColumns = event.target.checked; drawTable(); writeAddress(); });
onChange(drawTable);
