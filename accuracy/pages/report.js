"use strict";
(() => {
  const textOf = (row, column) => row.cells[column].textContent;
  const keyOf = (row, column) => row.cells[column].dataset.sort;

  const compare = (column, isText, sign) => (one, other) => {
    if (isText) {
      return sign * textOf(one, column).localeCompare(textOf(other, column), "en", {numeric: true});
    }
    const a = keyOf(one, column), b = keyOf(other, column);
    if (a === "" || b === "") return (a === "") - (b === ""); // what has no number stays last
    const x = toNumber(a), y = toNumber(b);
    return x === y ? 0 : sign * (x < y ? -1 : 1);
  };

  const toNumber = (text) =>
    text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text);

  const sortBy = (head) => {
    const table = head.closest("table"), isText = !head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const isUp = before ? before !== "ascending" : isText; // numbers: largest first
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    const body = table.tBodies[0], rows = [...body.rows];
    rows.sort(compare(head.cellIndex, isText, isUp ? 1 : -1));
    body.append(...rows);
  };

  const filterBy = (input) => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = document.getElementById(input.dataset.table).tBodies[0].rows;
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    document.querySelector(`[data-count="${input.dataset.table}"]`).textContent =
      `${shown} of ${rows.length}`;
  };

  const toggle = (button) => {
    const isOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isOn));
    const lines = button.closest("section").querySelectorAll("g[data-series]");
    for (const line of lines) {
      if (line.dataset.series === button.dataset.series) line.classList.toggle("off", !isOn);
    }
  };

  for (const head of document.querySelectorAll("th")) {
    head.firstElementChild.addEventListener("click", () => sortBy(head));
  }
  for (const input of document.querySelectorAll("input[data-table]")) {
    input.addEventListener("input", () => filterBy(input));
  }
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => toggle(button));
  }
})();
