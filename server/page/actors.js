// The four actors of a request's way, live: what passes between them, what waits, and the steps in flight.

import { whole } from "/page/svg.js";

const STATIONS = [
  ["ingress", "Ingress", "ids, deadlines, back-pressure"],
  ["tokenizer", "Tokenizer", "text, stop strings"],
  ["scheduler", "Scheduler", "the plan: rows, pages, budgets"],
  ["executor", "Executor", "the device: weights, KV pool, sampler"],
];
const WIRES = [["Tokenize", "Deltas"], ["Admit", "Tokens"], ["Step", "StepDone"]];
const LETTERS = 10;
const FASTEST_S = 0.5;

export class Flow {
  #before = null;

  constructor(list) {
    this.stations = STATIONS.map(([name, title, about]) => new Station(name, title, about));
    this.wires = WIRES.map(([there, back]) => new Wire(there, back));
    for (const [index, station] of this.stations.entries()) {
      list.append(station.element);
      if (this.wires[index]) list.append(this.wires[index].element);
    }
  }

  show(stats) {
    const now = performance.now() / 1000;
    const taken = new Map(stats.mailboxes.map((box) => [nameOf(box), box.taken]));
    const rate = (name) => {
      const earlier = this.#before?.taken.get(name);
      return earlier === undefined ? 0 : Math.max(0, taken.get(name) - earlier) / Math.max(0.1, now - this.#before.at);
    };
    for (const station of this.stations) {
      const boxes = stats.mailboxes.filter((box) => box.name.startsWith(station.name));
      station.show(boxes, boxes.reduce((sum, box) => sum + rate(nameOf(box)), 0));
    }
    for (const [index, wire] of this.wires.entries()) wire.show(this.stations[index].rate + this.stations[index + 1].rate);
    const latest = new Map(stats.steps.map((step) => [step.replica, step.id + 1]));
    const last = [...latest.values()].reduce((sum, count) => sum + count, 0) - 1;
    this.wires[2].carry(Array.from({ length: stats.steps_in_flight }, (_, index) => `step ${last + 1 + index}`));
    const steps = Math.max(0, last - (this.#before?.last ?? last)) / Math.max(0.1, now - (this.#before?.at ?? now));
    this.stations[3].line.textContent = `${whole(steps)} steps/s · ${stats.steps_in_flight} in flight`;
    this.#before = { taken, last, at: now };
  }
}

// What tells a mailbox from those of other replicas.
export function nameOf(box) {
  return box.replica ? `${box.name} of ${box.replica}` : box.name;
}

class Station {
  constructor(name, title, about) {
    this.name = name;
    this.rate = 0;
    this.element = made("li", "station");
    this.letters = Array.from({ length: LETTERS }, () => made("i", ""));
    this.box = made("div", "mailbox", "", ...this.letters);
    this.box.setAttribute("role", "img");
    this.line = made("p", "rate");
    this.element.append(made("h3", "", title), made("p", "about", about), this.box, this.line);
  }

  // Letters stand for 1, 2, 4, 8 ... messages: filled ones wait, framed ones have waited at once.
  show(boxes, rate) {
    this.rate = rate;
    const sum = (field) => boxes.reduce((total, box) => total + box[field], 0);
    const [waiting, peak] = [sum("waiting"), Math.max(0, ...boxes.map((box) => box.peak))];
    const level = (count) => (count ? Math.floor(Math.log2(count)) + 1 : 0);
    for (const [index, letter] of this.letters.entries()) {
      letter.className = index < level(waiting) ? "waits" : index < level(peak) ? "waited" : "";
    }
    this.box.setAttribute("aria-label", `${waiting} messages wait, ${peak} at most at once`);
    this.line.textContent = `${whole(rate)}/s · ${waiting} waiting · peak ${peak}`;
  }
}

class Wire {
  constructor(there, back) {
    this.track = made("span", "track", "", made("b", ""), made("b", "back"));
    this.load = made("span", "load");
    this.element = made("li", "wire", "", made("span", "there", there), this.track, made("span", "back", back), this.load);
  }

  show(rate) {
    this.element.classList.toggle("busy", rate > 0.5);
    const pace = Math.max(FASTEST_S, 2.5 / (1 + Math.log10(1 + rate)));
    this.track.style.setProperty("--pace", `${pace.toFixed(1)}s`);
  }

  carry(names) {
    this.load.replaceChildren(...names.map((name) => made("em", "", name)));
  }
}

function made(name, className, text = "", ...children) {
  const one = Object.assign(document.createElement(name), { className, textContent: text });
  one.append(...children);
  return one;
}
