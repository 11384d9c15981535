// The address keeps what is shown, so that a copied link opens the same view: `#cells=ar-t1&sort=-speedup&prompt=...`.
const OPENING = "-speedup";

function sortAsText() { return (state.sort.down ? "-" : "") + state.sort.name; }

function addressOfState() {
  const words = new URLSearchParams();
  if (!isAll()) words.set("cells", shownCells().map((number) => data.cells[number].key).join(","));
  if (sortAsText() !== OPENING) words.set("sort", sortAsText());
  if (state.allColumns) words.set("columns", "all");
  if (state.row) words.set("prompt", promptOf(state.row));
  return words.toString();
}

// The address of a section stays until there is something to keep.
function writeAddress() {
  const words = addressOfState();
  if (words || location.hash.includes("=")) history.replaceState(null, "", `#${words}`);
}

// What an address does not name, or names wrongly, is as at the opening.
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1)), keys = (words.get("cells") || "").split(",");
  const named = [...data.cells.keys()].filter((number) => keys.includes(data.cells[number].key));
  const sort = words.get("sort") || OPENING;
  state.shown = new Set(named.length ? named : data.cells.keys());
  state.sort = { name: sort.replace(/^-/, ""), down: sort.startsWith("-") };
  state.allColumns = words.get("columns") === "all";
  state.row = Math.max(0, [...rows.keys()].findIndex((row) => promptOf(row) === words.get("prompt")));
}

addEventListener("hashchange", () => {
  if (!location.hash.includes("=")) return writeAddress();
  readAddress();
  changed();
});
onChange(writeAddress);
