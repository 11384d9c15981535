// The table as files, and the link: rows and columns as they are shown, in their order.
function shownRows() { return [...table.tBodies[0].rows].filter((row) => !row.hidden); }
function shownColumns() { return [...heads.keys()].slice(1).filter((column) => state.allColumns || !heads[column].classList.contains("more")); }

// The columns of a file for a column of the table: the figure, and the ends of its interval if there are any.
function fieldsOf(column) {
  const { name } = heads[column].dataset, hasEnds = [...table.tBodies[0].rows].some((row) => row.children[column].dataset.low);
  const fields = [{ name, column, part: "order" }];
  return hasEnds ? [...fields, { name: `${name}_low`, column, part: "low" }, { name: `${name}_high`, column, part: "high" }] : fields;
}

function quoted(value) { return /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? ""; }

function csv() {
  const fields = shownColumns().flatMap(fieldsOf);
  const lines = shownRows().map((row) => {
    const cell = data.cells[row.dataset.cell];
    return [cell.run, cell.cell, cell.output, row.dataset.protocol, ...fields.map(({ column, part }) => row.children[column].dataset[part])];
  });
  const names = ["run", "cell_id", "output", "protocol", ...fields.map(({ name }) => name)];
  return [names, ...lines].map((line) => `${line.map(quoted).join(",")}\n`).join("");
}

function markdown() {
  const columns = shownColumns(), text = (node) => node.textContent.replace(/\s+/g, " ").trim();
  const title = (column) => find("button", heads[column]).firstChild.textContent;
  const lines = shownRows().map((row) => {
    const cell = data.cells[row.dataset.cell];
    return [[cell.name, row.dataset.protocol].filter(Boolean).join(" "), cell.output || "", ...columns.map((column) => text(row.children[column]))];
  });
  const rule = ["---", "---", ...columns.map(() => "---:")];
  return [["cell", "output", ...columns.map(title)], rule, ...lines].map((line) => `| ${line.map((word) => word.replaceAll("|", "\\|")).join(" | ")} |\n`).join("");
}

function download(text, ending) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  element("a", { href: url, download: `${data.name}.${ending}` }).click();
  URL.revokeObjectURL(url);
}

// Browsers keep the clipboard from some pages; these show the link instead.
async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    find("#copied").textContent = "Link copied";
  } catch { prompt("Copy this link", location.href); }
}

find("#csv").addEventListener("click", () => download(csv(), "csv"));
find("#markdown").addEventListener("click", () => download(markdown(), "md"));
find("#link").addEventListener("click", copyLink);
onChange(() => { find("#copied").textContent = ""; });
