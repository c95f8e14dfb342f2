// The live view: what /stats says, once a second while somebody looks.

import { Flow, nameOf } from "/page/actors.js";
import { Board } from "/page/board.js";
import { historyChart, sparkline, stepChart } from "/page/charts.js";
import { term } from "/page/help.js";
import { Cells, Mosaic } from "/page/mosaic.js";
import { Sessions } from "/page/sessions.js";
import { milliseconds, whole } from "/page/svg.js";
import { branchOf, prefixTree } from "/page/tree.js";
import { Why } from "/page/why.js";

const byId = (id) => document.getElementById(id);
const HISTORY = 90;

export class EngineView {
  #rates = [];
  #rows = [];
  #cells = new Cells({ runs: [], pages: 0, cell_pages: 1 });
  // What the tree on the screen was drawn from: the cells of its nodes are those of the same moment.
  #drawn = { state: "", nodes: [], cells: null, width: 0 };

  // model: returns which of several is shown.
  constructor(model) {
    this.why = new Why(model);
    this.sessions = new Sessions(model);
    const explain = (id) => this.why.open(id);
    this.board = new Board(byId("board"), byId("board-said"), (number) => this.#pointAtRequest(number), explain);
    this.mosaic = new Mosaic(byId("pool"), (cell) => this.#pointAtCell(cell));
    this.flow = new Flow(byId("flow"));
  }

  show(given) {
    const stats = { ...given, board: given.board.map(numbered) };
    this.#rates = [...this.#rates, stats.tokens_per_s.decode].slice(-HISTORY);
    const hidden = this.board.show(stats.board) + stats.board_hidden;
    byId("board-about").textContent = hidden ? `and ${whole(hidden)} more` : stats.board.length ? "" : "Nothing is due. Make load, or ask in the playground.";
    this.#rows = stats.board;
    this.why.remember(stats.board);
    this.why.refresh();
    this.sessions.refresh();
    this.#figures(stats);
    this.#pool(stats);
    this.#tree(stats);
    this.flow.show(stats);
    byId("steps").replaceChildren(stepChart(stats.steps, byId("steps").clientWidth));
    byId("steps-about").textContent = stats.steps.length ? `· half of all steps take less than ${milliseconds(stats.latency.step.p50)}` : "· none yet";
    byId("history").replaceChildren(historyChart(stats.history, byId("history").clientWidth));
    byId("mailboxes").replaceChildren(...stats.mailboxes.map((box) => row([nameOf(box), box.waiting, box.peak, box.capacity])));
  }

  #figures(stats) {
    const { requests, tokens, latency } = stats;
    const hits = tokens.prompt ? `${((100 * tokens.cached) / tokens.prompt).toFixed(0)} %` : "–";
    const rows = [
      ["output", "Output", whole(stats.tokens_per_s.decode), "tokens/s", sparkline(this.#rates)],
      ["prompts", "Prompts", whole(stats.tokens_per_s.prefill), "tokens/s"],
      ["running", "Running", `${requests.running}`, `of ${requests.max_running}`],
      ["waiting", "Waiting", `${requests.waiting}`, ""],
      ["first token", "First token", milliseconds(latency.ttft?.p50), `p99 ${milliseconds(latency.ttft?.p99)}`],
      ["between tokens", "Between tokens", milliseconds(latency.itl?.p50), `p99 ${milliseconds(latency.itl?.p99)}`],
      ["cached", "Prompt tokens cached", hits, ""],
      ["ended", "Requests ended", `${Object.values(stats.ended).reduce((sum, count) => sum + count, 0)}`, retold(stats)],
    ];
    const list = byId("figures");
    if (!list.children.length) list.append(...rows.map(([name, title]) => figure(name, title)));
    for (const [index, [, , value, unit, picture]] of rows.entries()) {
      const details = list.children[index].querySelector("dd");
      details.replaceChildren(`${value} `, Object.assign(document.createElement("small"), { textContent: unit }), ...(picture ? [picture] : []));
    }
  }

  #pool(stats) {
    const { pages } = stats;
    const names = ["used", "cached", "free"];
    const words = names.map((name) => `${whole(pages[name])} ${name}`);
    const total = names.reduce((sum, name) => sum + pages[name], 0);
    this.#cells = new Cells(stats.pool);
    this.mosaic.show(stats.pool, this.#cells, stats.board.map((request) => this.board.colourOf(request.number)));
    byId("pool").setAttribute("aria-label", `Of ${whole(total)} pages: ${words.join(", ")}`);
    const legend = byId("pages-legend");
    legend.replaceChildren();
    for (const [index, name] of names.entries()) legend.append(swatch(name), ` ${words[index]} `);
    const each = stats.pool.cell_pages > 1 ? `, a cell is ${stats.pool.cell_pages} of them` : "";
    legend.append(swatch("shared"), ` shared · ${whole(total)} pages of ${pages.page_size} tokens${each} · ${whole(stats.pool.evictions)} evicted`);
    if (pages.host_used) legend.append(` · ${whole(pages.host_used)} in host memory`);
  }

  #tree(stats) {
    byId("tree-about").textContent = stats.prefixes_complete ? "" : "Only the hottest part is shown.";
    const width = byId("tree").clientWidth;
    // Who walks through the picture must not lose their place each second.
    const state = JSON.stringify(stats.prefixes.map(({ idle_steps, ...node }) => node));
    if (state === this.#drawn.state && width === this.#drawn.width) this.#drawn.cells = this.#cells;
    else if (!byId("tree").contains(document.activeElement)) {
      this.#drawn = { state, width, nodes: stats.prefixes, cells: this.#cells };
      this.#drawTree(stats, width);
    }
  }

  #drawTree(stats, width) {
    const empty = Object.assign(document.createElement("p"), { className: "hint", textContent: "Nothing is cached yet." });
    const visit = (text, index) => {
      byId("node").textContent = text;
      this.mosaic.light(index === null ? new Set() : this.#drawn.cells.ofNodes(branchOf(this.#drawn.nodes, index)));
    };
    byId("tree").replaceChildren(stats.prefixes.length ? prefixTree(stats.prefixes, width, visit) : empty);
    byId("prefixes").replaceChildren(
      ...stats.prefixes.map((node) =>
        row([node.first_token, node.tokens || node.host_tokens, node.hits, node.locks, node.idle_steps, node.text ?? "not shown"]),
      ),
    );
  }

  // ---- what belongs together lights up together ----

  #pointAtRequest(number) {
    const index = this.#rows.findIndex((request) => request.number === number);
    this.mosaic.light(index < 0 ? new Set() : this.#cells.ofRow(index));
  }

  #pointAtCell(cell) {
    const node = cell === null ? -1 : (this.#drawn.cells?.nodes[cell] ?? -1);
    const request = cell === null ? undefined : this.#rows[this.#cells.shows[cell] - 4];
    for (const box of byId("tree").querySelectorAll("[data-index]")) box.classList.toggle("lit", Number(box.dataset.index) === node);
    this.board.light(request?.number ?? null);
    this.mosaic.light(node < 0 ? (request ? this.#cells.ofRow(this.#rows.indexOf(request)) : new Set()) : this.#drawn.cells.ofNodes(new Set([node])));
    byId("pool-about").textContent = cell === null ? "" : this.#aboutCell(cell, request, this.#drawn.nodes[node]);
  }

  #aboutCell(cell, request, node) {
    const first = cell * this.#cells.cellPages;
    const last = Math.min(first + this.#cells.cellPages, this.#cells.pages) - 1;
    const use = ["free", "cached, used by nobody now", "used", "shared by several requests"][this.#cells.shows[cell]];
    const parts = [last > first ? `pages ${first} to ${last}` : `page ${first}`, use ?? `used by request ${request?.number}`];
    if (node) parts.push(`part of a prefix found ${node.hits} times${node.text ? `: ${node.text}` : ""}`);
    return parts.join(" · ");
  }
}

// Replicas count their requests each for itself: request 7 of replica1 is 1:7.
function numbered(request) {
  return request.replica ? { ...request, number: `${request.replica.replace(/\D+/, "")}:${request.number}` } : request;
}

function figure(name, title) {
  const heading = document.createElement("dt");
  heading.append(term(name, title));
  const box = document.createElement("div");
  box.append(heading, document.createElement("dd"));
  return box;
}

function swatch(name) {
  return Object.assign(document.createElement("span"), { className: `swatch ${name}` });
}

function row(cells) {
  const made = document.createElement("tr");
  made.append(...cells.map((cell) => Object.assign(document.createElement("td"), { textContent: cell })));
  return made;
}

function retold(stats) {
  const parts = [];
  if (stats.retractions) parts.push(`${stats.retractions} retractions`);
  if (stats.restarts) parts.push(`${stats.restarts} restarts`);
  return parts.join(", ");
}
