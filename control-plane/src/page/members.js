// The table of members: sorted, filtered, in pages. Rows and buttons stay the same elements from one answer to the next,
// so that the keyboard's focus and a selection of text stay, too.

import { columnsOf, number, select, severityOfState } from "./model.js";

const PAGE_ROWS = 100;
const SIGNS = { good: "●", warn: "▲", bad: "✖" };
const VERBS = { drain: "Drain", resume: "Resume" };

export class Members {
  // `elements`: head, body, filter, count, pages, back, pageNumber, next. `change(member, action)` is called for a button.
  constructor(elements, change) {
    this.elements = elements;
    this.change = change;
    this.members = [];
    this.mayChange = false;
    this.columns = [];
    // Rows by member id, of the page that is shown.
    this.rows = new Map();
    this.column = "name";
    this.descending = false;
    this.page = 0;
    elements.back.addEventListener("click", () => this.turn(-1));
    elements.next.addEventListener("click", () => this.turn(1));
    elements.filter.addEventListener("input", () => {
      this.page = 0;
      this.draw();
    });
    this.drawHead();
  }

  show(members, mayChange) {
    this.members = members;
    this.mayChange = mayChange;
    if (columnsOf(members).length !== this.columns.length) this.drawHead();
    this.draw();
  }

  turn(step) {
    this.page = Math.max(0, this.page + step);
    this.draw();
  }

  draw() {
    const { body, count, filter, pages, back, pageNumber, next } = this.elements;
    const kept = select(this.members, filter.value, this.column, this.descending);
    const numPages = Math.max(1, Math.ceil(kept.length / PAGE_ROWS));
    this.page = Math.min(this.page, numPages - 1);
    const shown = kept.slice(this.page * PAGE_ROWS, (this.page + 1) * PAGE_ROWS);
    count.textContent = `${number(kept.length)} of ${number(this.members.length)} members`;
    pages.hidden = numPages === 1;
    pageNumber.textContent = `page ${this.page + 1} of ${numPages}`;
    // A disabled button would lose the focus.
    back.setAttribute("aria-disabled", String(this.page === 0));
    next.setAttribute("aria-disabled", String(this.page === numPages - 1));

    const focused = document.activeElement;
    const rows = new Map(shown.map((member) => [member.member_id, this.rows.get(member.member_id) ?? this.newRow()]));
    for (const [id, row] of this.rows) if (!rows.has(id)) row.element.remove();
    this.rows = rows;
    shown.forEach((member, nth) => {
      const row = rows.get(member.member_id);
      this.fill(row, member);
      const there = body.children[nth];
      if (there !== row.element) body.insertBefore(row.element, there ?? null);
    });
    // A row that moves loses the focus.
    if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
  }

  newRow() {
    const row = { element: make("tr"), cells: [], button: make("button"), member: null, action: null };
    row.cells = this.columns.map((column) => make("td", column.isNumber ? "number" : column.isNote ? "note" : ""));
    row.button.type = "button";
    row.button.addEventListener("click", () => this.change(row.member, row.action));
    const last = make("td");
    last.append(row.button);
    row.element.append(...row.cells, last);
    return row;
  }

  fill(row, member) {
    row.member = member;
    row.action = this.mayChange ? { serving: "drain", draining: "resume" }[member.state] ?? null : null;
    this.columns.forEach((column, nth) => {
      const cell = row.cells[nth];
      let text = column.text(member);
      if (column.id === "state") {
        const severity = severityOfState(member);
        cell.className = severity;
        text = `${SIGNS[severity]} ${text}`;
      }
      setText(cell, text);
    });
    row.button.hidden = !row.action;
    const verb = VERBS[row.action] ?? "";
    setText(row.button, verb);
    row.button.setAttribute("aria-label", `${verb} ${member.name}`);
  }

  drawHead() {
    const { head } = this.elements;
    const focused = [...head.children].findIndex((cell) => cell.contains(document.activeElement));
    this.columns = columnsOf(this.members);
    // Rows have a cell for each column.
    for (const row of this.rows.values()) row.element.remove();
    this.rows = new Map();
    const cells = this.columns.map((column) => {
      const cell = make("th", column.isNumber ? "number" : "");
      cell.scope = "col";
      const button = make("button");
      button.type = "button";
      button.textContent = column.title;
      if (column.id === this.column) {
        button.append(this.descending ? " ↓" : " ↑");
        cell.ariaSort = this.descending ? "descending" : "ascending";
      }
      button.addEventListener("click", () => this.sortBy(column));
      cell.append(button);
      return cell;
    });
    const action = make("th");
    action.textContent = "Action";
    action.scope = "col";
    head.replaceChildren(...cells, action);
    cells[focused]?.firstChild.focus({ preventScroll: true });
  }

  sortBy(column) {
    this.descending = this.column === column.id ? !this.descending : Boolean(column.isNumber);
    this.column = column.id;
    this.drawHead();
    this.draw();
  }
}

function make(tag, className) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  return element;
}

// Text that stays is not set again: a selection in it would end.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
