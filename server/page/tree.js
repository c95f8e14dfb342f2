// The prefix cache as a picture.

import { element, titled } from "/page/svg.js";

const ROW = 20;
const MIN_TEXT_WIDTH = 60;

// Prefixes as boxes: as wide as they are long, as high as they have continuations.  Arrow keys walk through them.
// width: in pixels.  onVisit: told of the text and the index of the node under the pointer or the focus, or null.
export function prefixTree(nodes, width, onVisit) {
  const boxes = nodes.map((node, index) => ({ node, index, children: [], top: 0, rows: 1 }));
  const roots = boxes.filter((box) => box.node.parent < 0);
  for (const box of boxes) if (box.node.parent >= 0) boxes[box.node.parent].children.push(box);
  let rows = 0;
  const place = (box, level) => {
    box.top = rows;
    box.level = level;
    if (box.children.length) box.children.forEach((child) => place(child, level + 1));
    else rows += 1;
    box.rows = rows - box.top;
  };
  roots.forEach((box) => place(box, 1));
  const ends = nodes.map((node) => node.first_token + Math.max(node.tokens, node.host_tokens));
  const scale = width / Math.max(...ends, 1);
  const hottest = Math.max(...nodes.map((node) => node.hits), 1);
  const svg = element("svg", {
    viewBox: `0 0 ${width} ${Math.max(rows, 1) * ROW}`,
    role: "tree",
    "aria-label": "Cached prefixes",
  });
  for (const box of boxes) svg.append(draw(box, scale, hottest, onVisit));
  const first = svg.querySelector("g");
  first?.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => walk(event, boxes, roots, svg));
  return svg;
}

function draw(box, scale, hottest, onVisit) {
  const { node } = box;
  const width = Math.max(3, Math.max(node.tokens, node.host_tokens) * scale);
  const heat = Math.min(4, Math.floor((5 * Math.log1p(node.hits)) / Math.log1p(hottest + 1)));
  const kinds = [`heat-${heat}`, node.locks ? "locked" : "", node.tokens ? "" : "host"].filter(Boolean);
  const x = node.first_token * scale;
  const y = box.top * ROW;
  const group = element("g", {
    class: kinds.join(" "),
    role: "treeitem",
    tabindex: "-1",
    "aria-level": box.level,
    "aria-label": describeNode(node),
    "data-index": box.index,
  });
  group.append(titled(describeNode(node)), element("rect", { x, y, width, height: box.rows * ROW, rx: 2 }));
  if (width > MIN_TEXT_WIDTH) {
    const room = Math.floor(width / 7) - 1;
    const label = element("text", { x: x + 4, y: y + 14 });
    label.textContent = (node.text ?? `${node.tokens || node.host_tokens} tokens`).replace(/\s+/g, " ").slice(0, room);
    group.append(label);
  }
  const visit = () => onVisit(describeNode(node), box.index);
  group.addEventListener("focus", visit);
  group.addEventListener("pointerenter", visit);
  group.addEventListener("blur", () => onVisit("", null));
  group.addEventListener("pointerleave", () => onVisit("", null));
  return group;
}

// The indexes of a node and of all below it.
export function branchOf(nodes, index) {
  const branch = new Set([index]);
  nodes.forEach((node, at) => branch.has(node.parent) && branch.add(at)); // parents come first
  return branch;
}

function walk(event, boxes, roots, svg) {
  const index = Number(event.target.dataset.index);
  if (Number.isNaN(index)) return;
  const box = boxes[index];
  const siblings = box.node.parent < 0 ? roots : boxes[box.node.parent].children;
  const place = siblings.indexOf(box);
  const goal = {
    ArrowRight: box.children[0],
    ArrowLeft: boxes[box.node.parent],
    ArrowDown: siblings[place + 1],
    ArrowUp: siblings[place - 1],
    Home: roots[0],
  }[event.key];
  if (!goal) return;
  event.preventDefault();
  svg.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
  const group = svg.querySelector(`[data-index="${goal.index}"]`);
  group.setAttribute("tabindex", "0");
  group.focus();
}

function describeNode(node) {
  const size = node.tokens ? `${node.tokens} tokens` : `${node.host_tokens} tokens in host memory`;
  const parts = [`${size} from ${node.first_token} on`, `found ${node.hits} times`];
  parts.push(node.locks ? `needed by ${node.locks}` : `idle for ${node.idle_steps} steps`);
  if (node.children) parts.push(`${node.children} continuations`);
  if (node.salted) parts.push("of one client only");
  return parts.join(", ") + (node.text ? `: ${node.text}` : "");
}
