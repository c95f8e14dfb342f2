// Split flaps: a fixed number of tiles that turn, one letter after another, until they show a text.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const DIGITS = "0123456789";
const TURN_MS = 45;
const MOST_TURNS = 5;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// Every tile that is turning: tile -> { letter, turns }.
const turning = new Map();
let timer = null;

function turn() {
  for (const [tile, goal] of turning) {
    if (goal.turns-- > 0) {
      const wheel = /\d/.test(goal.letter) ? DIGITS : LETTERS;
      tile.textContent = wheel[Math.floor(Math.random() * wheel.length)];
      continue;
    }
    tile.textContent = goal.letter;
    tile.classList.remove("turning");
    turning.delete(tile);
  }
  if (!turning.size) {
    clearInterval(timer);
    timer = null;
  }
}

export class Flaps {
  #text = "";

  // A cell of a table: the tiles for the eye, the text for those who read otherwise.
  constructor(length, className) {
    this.element = Object.assign(document.createElement("div"), { className: `flaps ${className}` });
    this.element.setAttribute("role", "cell");
    this.spoken = Object.assign(document.createElement("span"), { className: "hidden" });
    const tiles = document.createElement("span");
    tiles.setAttribute("aria-hidden", "true");
    this.tiles = Array.from({ length }, () => document.createElement("i"));
    tiles.append(...this.tiles);
    this.element.append(this.spoken, tiles);
  }

  show(text) {
    if (text === this.#text) return;
    this.#text = text;
    this.spoken.textContent = text;
    const letters = [...text];
    for (const [index, tile] of this.tiles.entries()) this.#turn(tile, (letters[index] ?? "").toUpperCase(), index);
  }

  #turn(tile, letter, index) {
    if (still.matches || document.hidden) {
      turning.delete(tile);
      tile.classList.remove("turning");
      tile.textContent = letter;
    } else if (turning.has(tile) || tile.textContent !== letter) {
      tile.classList.add("turning");
      turning.set(tile, { letter, turns: 1 + Math.floor(Math.random() * MOST_TURNS) + Math.floor(index / 8) });
      timer ??= setInterval(turn, TURN_MS);
    }
  }
}
