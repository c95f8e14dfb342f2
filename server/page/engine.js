// The live view: what /stats says, once a second while somebody looks.

import { milliseconds, prefixTree, sparkline, timeline } from "/page/drawing.js";

const byId = (id) => document.getElementById(id);
const HISTORY = 90;

export class EngineView {
  #rates = [];
  #drawnTree = "";

  show(stats) {
    this.#rates = [...this.#rates, stats.tokens_per_s.decode].slice(-HISTORY);
    this.#figures(stats);
    this.#pages(stats.pages);
    byId("steps").replaceChildren(timeline(stats.steps.slice(-128)));
    const last = stats.steps.at(-1);
    byId("steps-about").textContent = last ? `· a step takes ${milliseconds(stats.latency.step.p50)} in the middle` : "· none yet";
    this.#tree(stats);
    this.#mailboxes(stats.mailboxes);
  }

  #figures(stats) {
    const { requests, tokens, latency } = stats;
    const hits = tokens.prompt ? `${((100 * tokens.cached) / tokens.prompt).toFixed(0)} %` : "–";
    const rows = [
      ["Output", `${whole(stats.tokens_per_s.decode)}`, "tokens/s", sparkline(this.#rates)],
      ["Prompts", `${whole(stats.tokens_per_s.prefill)}`, "tokens/s"],
      ["Running", `${requests.running}`, `of ${requests.max_running}`],
      ["Waiting", `${requests.waiting}`, ""],
      ["First token", milliseconds(latency.ttft?.p50), `p99 ${milliseconds(latency.ttft?.p99)}`],
      ["Between tokens", milliseconds(latency.itl?.p50), `p99 ${milliseconds(latency.itl?.p99)}`],
      ["Prompt tokens cached", hits, ""],
      ["Requests ended", `${Object.values(stats.ended).reduce((sum, count) => sum + count, 0)}`, retold(stats)],
    ];
    byId("figures").replaceChildren(...rows.map(([name, value, unit, picture]) => figure(name, value, unit, picture)));
  }

  #pages(pages) {
    const names = ["used", "cached", "free"];
    const total = names.reduce((sum, name) => sum + pages[name], 0);
    const bar = byId("pages");
    if (!bar.children.length) {
      for (const name of names) bar.append(Object.assign(document.createElement("div"), { className: name }));
    }
    names.forEach((name, index) => bar.children[index].style.setProperty("flex-grow", pages[name]));
    const words = names.map((name) => `${pages[name]} ${name}`);
    bar.setAttribute("aria-label", `Of ${total} pages: ${words.join(", ")}`);
    const legend = byId("pages-legend");
    legend.replaceChildren();
    for (const [index, name] of names.entries()) {
      legend.append(Object.assign(document.createElement("span"), { className: `swatch ${name}` }), ` ${words[index]} `);
    }
    legend.append(`· ${total} pages of ${pages.page_size} tokens`);
    if (pages.host_used) legend.append(` · ${pages.host_used} in host memory`);
  }

  #tree(stats) {
    byId("tree-about").textContent = stats.prefixes_complete ? "" : "Only the hottest part is shown.";
    // Who walks through the picture must not lose their place each second.
    const state = JSON.stringify(stats.prefixes.map(({ idle_steps, ...node }) => node));
    if (state === this.#drawnTree || byId("tree").contains(document.activeElement)) return;
    this.#drawnTree = state;
    const empty = document.createElement("p");
    empty.className = "hint";
    empty.textContent = "Nothing is cached yet.";
    const picture = stats.prefixes.length ? prefixTree(stats.prefixes, (text) => (byId("node").textContent = text)) : empty;
    byId("tree").replaceChildren(picture);
    byId("prefixes").replaceChildren(
      ...stats.prefixes.map((node) =>
        row([node.first_token, node.tokens || node.host_tokens, node.hits, node.locks, node.idle_steps, node.text ?? "not shown"]),
      ),
    );
  }

  #mailboxes(boxes) {
    byId("mailboxes").replaceChildren(...boxes.map((box) => row([box.name, box.waiting, box.peak, box.capacity])));
  }
}

function figure(name, value, unit, picture) {
  const term = Object.assign(document.createElement("dt"), { textContent: name });
  const details = Object.assign(document.createElement("dd"), { textContent: `${value} ` });
  details.append(Object.assign(document.createElement("small"), { textContent: unit }));
  const box = document.createElement("div");
  box.append(term, details, ...(picture ? [picture] : []));
  return box;
}

function row(cells) {
  const made = document.createElement("tr");
  made.append(...cells.map((cell) => Object.assign(document.createElement("td"), { textContent: cell })));
  return made;
}

function whole(count) {
  return Math.round(count).toLocaleString("en");
}

function retold(stats) {
  const parts = [];
  if (stats.retractions) parts.push(`${stats.retractions} retractions`);
  if (stats.restarts) parts.push(`${stats.restarts} restarts`);
  return parts.join(", ");
}
