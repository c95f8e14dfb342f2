// The tour: five things to look at, four seconds each, while some load gives them something to show.

const byId = (id) => document.getElementById(id);
const EACH_MS = 4000;
const STOPS = [
  ["departures", "The board has a line for each request: it waits, its prompt is read, it decodes, it departs."],
  ["flow-title", "Four actors pass messages. The scheduler plans a step while the executor still computes the one before."],
  ["pool-panel", "All memory is pages. Each request's have its colour; striped ones are shared, pale ones wait to be found again."],
  ["tree-panel", "Prompts that begin alike share their pages. Point at a branch, and its pages light up."],
  ["steps-panel", "Each bar is one pass through the model: blue for tokens of answers, amber for tokens of prompts."],
];
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Tour {
  #at = -1;
  #timer = null;

  // begin: called first, to give the tour something to show.
  constructor(begin) {
    this.said = document.createElement("p");
    this.next = button("Next", () => this.#go(this.#at + 1));
    this.guide = document.createElement("aside");
    this.guide.className = "guide";
    this.guide.hidden = true;
    this.guide.setAttribute("aria-label", "Tour");
    this.said.setAttribute("role", "status");
    this.guide.append(this.said, this.next, button("End", () => this.#go(STOPS.length)));
    byId("main").append(this.guide);
    byId("tour").addEventListener("click", () => {
      begin();
      this.#go(0);
      this.next.focus({ preventScroll: true });
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#at >= 0) this.#go(STOPS.length);
    });
  }

  #go(place) {
    clearTimeout(this.#timer);
    document.querySelector(".toured")?.classList.remove("toured");
    this.#at = place < STOPS.length ? place : -1;
    this.guide.hidden = this.#at < 0;
    if (this.#at < 0) {
      byId("tour").focus();
      return;
    }
    const [id, text] = STOPS[place];
    const target = byId(id).closest("section");
    target.classList.add("toured");
    target.scrollIntoView({ behavior: still.matches ? "auto" : "smooth", block: "center" });
    this.said.textContent = `${place + 1} of ${STOPS.length}: ${text}`;
    // Who asked for less motion goes on by the button.
    if (!still.matches) this.#timer = setTimeout(() => this.#go(place + 1), EACH_MS);
  }
}

function button(text, onClick) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", onClick);
  return made;
}
