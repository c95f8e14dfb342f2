// The departures board: a line of split flaps for each request.  A request keeps its line until it has left.

import { post } from "/page/api.js";
import { Flaps } from "/page/flaps.js";
import { term } from "/page/help.js";
import { agoOf } from "/page/svg.js";

export const NUM_COLOURS = 12;
const MIN_LINES = 8;
const FEW_LINES = 14;
const LOOKS_AFTER_LEAVING = 2;
const WORDS = 33;
const STATE = 13;
const COLUMNS = [
  ["number", "No.", 5],
  ["words", "Request", WORDS],
  ["state", "State", STATE],
  ["cached", "Cached", 4],
  ["tokens", "Tokens", 6],
  ["speed", "Tok/s", 5],
];
const PLAIN = [["age", "Age"], ["client", "Client"], ["id", "Id"]]; // no flaps: small print at the end of a line
const ID_END = 6; // what tells ids apart
const EXPLAINED = new Set(["state", "cached", "tokens", "speed"]);

export class Board {
  #lines = [];
  #all = false;
  #onPoint = () => {};

  // root: the table.  said: where news of aborts go.  onPoint: told of the number of the request under the pointer.
  // explain: told of the id of a request whose time is asked for.
  constructor(root, said, onPoint, explain) {
    this.root = root;
    this.said = said;
    this.#onPoint = onPoint;
    this.explain = explain;
    const head = part("row", "line head", ...[...COLUMNS, ...PLAIN, ["end", ""]].map(([name, title]) => heading(name, title)));
    this.body = part("rowgroup", "lines");
    this.more = Object.assign(document.createElement("button"), { type: "button", className: "ghost more", hidden: true });
    this.more.addEventListener("click", () => {
      this.#all = !this.#all;
      this.more.textContent = this.#all ? "Show fewer" : "Show all";
    });
    root.append(part("rowgroup", "", head), this.body);
    root.after(this.more);
    while (this.#lines.length < MIN_LINES) this.#addLine();
  }

  // Which of the colours a request has, or -1 while it has no line.
  colourOf(number) {
    return this.#lines.findIndex((line) => line.number === number && !line.left) % NUM_COLOURS;
  }

  // Marks the line of a request, or none.
  light(number) {
    for (const line of this.#lines) line.element.classList.toggle("lit", number !== null && line.number === number);
  }

  // rows: as /stats has them.  Returns how many have no line.
  show(rows) {
    const present = new Map(rows.map((row) => [row.number, row]));
    for (const line of this.#lines) {
      if (line.number === null) continue;
      const row = present.get(line.number);
      if (row) line.show(row);
      else if (line.left++ === 0) line.leave();
      else if (line.left > LOOKS_AFTER_LEAVING) line.clear();
      present.delete(line.number);
    }
    const most = this.#all ? Infinity : FEW_LINES;
    for (const row of present.values()) {
      const free = this.#free() ?? (this.#lines.length < most ? this.#addLine() : this.#lines.find((line) => line.left > 1));
      if (!free) break;
      free.show(row);
      present.delete(row.number);
    }
    this.#trim();
    this.more.hidden = !present.size && !this.#all;
    if (!this.#all) this.more.textContent = "Show all";
    return present.size;
  }

  #free() {
    return this.#lines.find((line) => line.number === null);
  }

  #addLine() {
    const line = new Line(this.said, this.#onPoint, this.explain, this.#lines.length % NUM_COLOURS);
    this.#lines.push(line);
    this.body.append(line.element);
    return line;
  }

  #trim() {
    const most = this.#all ? Infinity : FEW_LINES;
    while (this.#lines.length > MIN_LINES && (this.#lines.at(-1).number === null || this.#lines.length > most)) {
      this.#lines.pop().element.remove();
    }
  }
}

class Line {
  constructor(said, onPoint, explain, colour) {
    this.number = null;
    this.left = 0;
    this.said = said;
    this.cells = Object.fromEntries(COLUMNS.map(([name, , length]) => [name, new Flaps(length, name)]));
    this.end = Object.assign(document.createElement("button"), { type: "button", className: "abort", textContent: "Abort" });
    this.end.addEventListener("click", () => this.#abort());
    this.why = Object.assign(document.createElement("button"), { type: "button", className: "abort", textContent: "Why" });
    this.why.addEventListener("click", () => explain(this.id));
    this.plain = Object.fromEntries(PLAIN.map(([name]) => [name, part("cell", `plain ${name}`)]));
    const cells = [...Object.values(this.cells).map((flaps) => flaps.element), ...Object.values(this.plain)];
    this.element = part("row", `line blank colour-${colour}`, ...cells, part("cell", "end", this.why, " ", this.end));
    this.element.addEventListener("pointerenter", () => onPoint(this.number));
    this.element.addEventListener("pointerleave", () => onPoint(null));
    this.clear();
  }

  show(row) {
    this.number = row.number;
    this.id = row.id;
    this.left = 0;
    this.element.className = this.element.className.replace(/ (blank|departed|is-\w+)/g, "") + ` is-${row.state}`;
    const words = row.words ?? "(another client's)";
    const speed = row.decoding_s > 0.05 && row.output_tokens > 1 ? (row.output_tokens - 1) / row.decoding_s : null;
    this.cells.number.show(String(row.number));
    this.cells.words.show(words || "(no words)");
    this.cells.state.show(stateOf(row));
    this.cells.cached.show(row.state === "waiting" ? "" : `${Math.floor((100 * row.cached_tokens) / row.prompt_tokens)}%`);
    this.cells.tokens.show(String(row.output_tokens));
    this.cells.speed.show(speed === null ? "" : speed < 100 ? speed.toFixed(1) : speed.toFixed(0));
    this.plain.age.textContent = agoOf(row.age_s);
    this.plain.client.textContent = row.client ?? "";
    this.plain.id.textContent = row.id?.slice(-ID_END) ?? "";
    this.end.hidden = this.why.hidden = !row.id;
    this.why.setAttribute("aria-label", `Why request ${row.number} takes as long as it does`);
    this.end.setAttribute("aria-label", `Abort request ${row.number}, and whatever came in the same call`);
    this.element.title = row.words ? `${row.words}\n${row.prompt_tokens} prompt tokens, from ${row.client}, ${row.id}` : "";
  }

  leave() {
    this.element.className = this.element.className.replace(/ is-\w+/g, "") + " departed";
    this.cells.state.show("DEPARTED");
    this.end.hidden = true;
  }

  clear() {
    this.number = null;
    this.left = 0;
    this.element.className = this.element.className.replace(/ (blank|departed|is-\w+)/g, "") + " blank";
    this.element.title = "";
    for (const flaps of Object.values(this.cells)) flaps.show("");
    for (const cell of Object.values(this.plain)) cell.textContent = "";
    this.end.hidden = this.why.hidden = true;
  }

  async #abort() {
    const number = this.number;
    this.end.hidden = true;
    try {
      await post("/abort_request", { rid: this.id });
      this.said.textContent = `Request ${number} was aborted.`;
    } catch (error) {
      this.said.textContent = `Request ${number}: ${error.message}`;
    }
  }
}

function stateOf(row) {
  if (row.state !== "prefill") return row.state.toUpperCase();
  const share = row.prompt_tokens ? row.prefilled_tokens / row.prompt_tokens : 0;
  return `PREFILL ${Math.min(row.chunks, Math.floor(share * row.chunks) + 1)}/${row.chunks}`;
}

function heading(name, title) {
  const cell = part("columnheader", name, ...(EXPLAINED.has(name) ? [term(name, title)] : [title]));
  if (name === "end") cell.append(Object.assign(document.createElement("span"), { className: "hidden", textContent: "Abort" }));
  return cell;
}

function part(role, className, ...children) {
  const made = Object.assign(document.createElement("div"), { className });
  made.setAttribute("role", role);
  made.append(...children);
  return made;
}
