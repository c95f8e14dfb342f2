// Where the time of one request went: a bar of its parts, and a sentence for each.

import { getExplanation } from "/page/api.js";
import { element, milliseconds, titled } from "/page/svg.js";

const byId = (id) => document.getElementById(id);
const RECENT = 20;
const WIDTH = 1000;
const HEIGHT = 28;
const NAMES = { prefills: "beside prompts", slow_steps: "slow steps", slow_reader: "slow reader" };

export class Why {
  #id = null;
  #ended = false;
  #recent = new Map();

  // model: returns which of several is shown.
  constructor(model) {
    this.model = model;
    byId("why-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.open(byId("why-id").value.trim());
    });
  }

  // rows: those on the board now; who leaves it can still be asked for.
  remember(rows) {
    const before = this.#recent.size && [...this.#recent.keys()].at(-1);
    for (const row of rows) {
      if (row.id && !this.#recent.has(row.id)) this.#recent.set(row.id, row.words ?? "");
    }
    while (this.#recent.size > RECENT) this.#recent.delete(this.#recent.keys().next().value);
    if ([...this.#recent.keys()].at(-1) === before) return;
    const options = [...this.#recent].reverse().map(([id, words]) => Object.assign(document.createElement("option"), { value: id, label: words }));
    byId("why-recent").replaceChildren(...options);
  }

  open(id) {
    if (!id) return;
    this.#id = byId("why-id").value = id;
    this.#ended = false;
    byId("why-title").scrollIntoView({ block: "nearest" });
    byId("why-title").focus();
    return this.refresh();
  }

  // Asks again for a request that had not ended when it was asked for.
  async refresh() {
    const id = this.#id;
    if (id === null || this.#ended) return;
    try {
      const told = await getExplanation(id, this.model());
      if (id === this.#id) this.#show(told);
    } catch (error) {
      if (id !== this.#id) return;
      this.#ended = true;
      byId("why-said").textContent = error.message;
      byId("why-bar").replaceChildren();
      byId("why-parts").replaceChildren();
    }
  }

  #show(told) {
    this.#ended = told.ended;
    const [choice] = told.choices.filter((one) => one.number === told.number);
    const tokens = choice ? `, ${choice.prompt_tokens} prompt tokens${choice.output_tokens === null ? "" : ` and ${choice.output_tokens} of output`}` : "";
    byId("why-said").textContent = `${told.id}: ${milliseconds(told.seconds)} ${told.ended ? "in all" : "until now"}${tokens}${told.difference ? `. ${told.difference.text}` : ""}`;
    byId("why-bar").replaceChildren(bar(told));
    byId("why-parts").replaceChildren(...told.parts.map((part) => line(part, told.seconds)));
  }
}

function bar(told) {
  const about = told.parts.map((part) => `${nameOf(part)} ${percent(part, told.seconds)}`).join(", ");
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": about });
  let x = 0;
  for (const part of told.parts) {
    const width = (WIDTH * part.seconds) / told.seconds;
    const title = titled(`${nameOf(part)}: ${milliseconds(part.seconds)}`);
    svg.append(element("rect", { class: `part-${part.name}`, x, y: 0, width, height: HEIGHT }, title));
    x += width;
  }
  return svg;
}

function line(part, seconds) {
  const swatch = Object.assign(document.createElement("span"), { className: `swatch part-${part.name}` });
  const name = Object.assign(document.createElement("b"), { textContent: nameOf(part) });
  const made = document.createElement("li");
  made.append(swatch, " ", name, ` ${milliseconds(part.seconds)}, ${percent(part, seconds)}. ${part.text}`);
  return made;
}

function nameOf(part) {
  return NAMES[part.name] ?? part.name;
}

function percent(part, seconds) {
  return `${((100 * part.seconds) / seconds).toFixed(1)} %`;
}
