// The pool as a mosaic: a cell for each page, or for a few, in the colour of the request that uses it.

import { NUM_COLOURS } from "/page/board.js";

const [FREE, CACHED, , SHARED, FIRST_ROW] = [0, 1, 2, 3, 4];
const HEIGHT = 230;
const LEAST = 5;
const MOST = 28;
const FLASH_MS = 1200;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// The cells of a pool: what each shows, and the node of the prefix cache that has it.
export class Cells {
  constructor(pool) {
    this.shows = pool.runs.flatMap(([count, show]) => new Array(count).fill(show));
    this.nodes = pool.runs.flatMap(([count, , node]) => new Array(count).fill(node));
    this.pages = pool.pages;
    this.cellPages = pool.cell_pages;
  }

  ofNodes(indexes) {
    return new Set(this.nodes.flatMap((node, cell) => (indexes.has(node) ? [cell] : [])));
  }

  ofRow(row) {
    return new Set(this.shows.flatMap((show, cell) => (show === FIRST_ROW + row ? [cell] : [])));
  }
}

export class Mosaic {
  #cells = new Cells({ runs: [], pages: 0, cell_pages: 1 });
  #colours = [];
  #lit = new Set();
  #flashes = new Map();
  #evictions = null;
  #drawing = false;

  // canvas: to draw on.  onPoint: told of the cell under the pointer, or null.
  constructor(canvas, onPoint) {
    this.canvas = canvas;
    canvas.addEventListener("pointermove", (event) => onPoint(this.#at(event)));
    canvas.addEventListener("pointerleave", () => onPoint(null));
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
  }

  // colours: for each row of the board the number of its colour, or -1.
  show(pool, cells, colours) {
    this.#cells = cells;
    this.#colours = colours;
    if (this.#evictions !== null) {
      const now = performance.now();
      for (const [number, cell] of pool.evicted) if (number > this.#evictions) this.#flashes.set(cell, now);
    }
    this.#evictions = pool.evictions;
    this.#draw();
  }

  light(cells) {
    this.#lit = cells;
    this.#draw();
  }

  #grid() {
    const width = this.canvas.parentElement.clientWidth - parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft) * 2;
    const count = this.#cells.shows.length;
    const size = Math.max(LEAST, Math.min(MOST, Math.floor(Math.sqrt((width * HEIGHT) / Math.max(count, 1)))));
    const columns = Math.max(1, Math.floor(width / size));
    return { size, columns, width, height: Math.max(1, Math.ceil(count / columns)) * size };
  }

  #at(event) {
    const { size, columns } = this.#grid();
    const column = Math.floor(event.offsetX / size);
    const cell = Math.floor(event.offsetY / size) * columns + column;
    return column < columns && cell < this.#cells.shows.length ? cell : null;
  }

  #draw() {
    const { size, columns, width, height } = this.#grid();
    if (width <= 0) return;
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const seats = Array.from({ length: NUM_COLOURS }, (_, index) => colour(`--seat-${index}`));
    const [free, cached, used, shared, ink] = ["--free", "--cached", "--used", "--shared", "--text"].map(colour);
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.setProperty("height", `${height}px`);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const now = performance.now();
    const side = size - (size > 6 ? 2 : 1);
    for (const [cell, show] of this.#cells.shows.entries()) {
      const x = (cell % columns) * size;
      const y = Math.floor(cell / columns) * size;
      const seat = this.#colours[show - FIRST_ROW] ?? -1;
      pen.globalAlpha = this.#lit.size && !this.#lit.has(cell) ? 0.3 : 1;
      pen.fillStyle = show === FREE ? free : show === CACHED ? cached : show === SHARED ? shared : seat >= 0 ? seats[seat] : used;
      pen.beginPath();
      pen.roundRect(x, y, side, side, size > 9 ? 2 : 0);
      pen.fill();
      if (show === SHARED) stripe(pen, x, y, side, free);
      if (this.#lit.has(cell)) outline(pen, x, y, side, ink);
      const flash = this.#flashes.get(cell);
      if (flash === undefined) continue;
      const age = (now - flash) / FLASH_MS;
      if (age >= 1) this.#flashes.delete(cell);
      pen.globalAlpha = still.matches ? 1 : Math.max(0, 1 - age);
      outline(pen, x, y, side, colour("--flash"));
      if (!still.matches) pen.fillRect(x, y, side, side);
    }
    if (this.#flashes.size && !this.#drawing) {
      this.#drawing = true;
      setTimeout(() => requestAnimationFrame(() => {
        this.#drawing = false;
        this.#draw();
      }), 60);
    }
  }
}

function stripe(pen, x, y, side, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = Math.max(1, side / 6);
  pen.beginPath();
  pen.moveTo(x, y + side);
  pen.lineTo(x + side, y);
  pen.stroke();
}

function outline(pen, x, y, side, colour) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 1.5;
  pen.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
}
