// Pictures out of numbers, as SVG.  Nothing here knows where the numbers come from.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function titled(text) {
  const title = element("title");
  title.textContent = text;
  return title;
}

export function sparkline(values) {
  const most = Math.max(...values, 1);
  const points = values.map((value, index) => `${index},${(30 - (28 * value) / most).toFixed(1)}`);
  const width = Math.max(values.length - 1, 1);
  const svg = element("svg", { class: "spark", viewBox: `0 0 ${width} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(element("path", { d: points.length > 1 ? `M${points.join("L")}` : "" }));
  return svg;
}

// A bar for each step, as high as it took long; its parts as large as their tokens' share.
export function timeline(steps) {
  const width = 4;
  const longest = Math.max(...steps.map((step) => step.seconds), 1e-6);
  const svg = element("svg", {
    class: "steps",
    viewBox: `0 0 ${Math.max(steps.length, 32) * width} 100`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `The last ${steps.length} steps; the longest took ${milliseconds(longest)}`,
  });
  steps.forEach((step, index) => {
    const height = Math.max(2, (100 * step.seconds) / longest);
    const share = step.prefill_tokens / Math.max(1, step.prefill_tokens + step.decodes);
    const about = `step ${step.id}: ${milliseconds(step.seconds)}, ${step.decodes} decoding, ` +
      `${step.prefill_tokens} prompt tokens of ${step.prefills} requests`;
    const bar = (kind, y, part) => element("rect", { class: kind, x: index * width, y, width: width - 1, height: part });
    const group = element("g", {}, titled(about), bar("prefill", 100 - height, height * share));
    group.append(bar("decode", 100 - height * (1 - share), height * (1 - share)));
    svg.append(group);
  });
  return svg;
}

const ROW = 18;
const WIDTH = 1000;
const MIN_TEXT_WIDTH = 60;

// Prefixes as boxes: as wide as they are long, as high as they have continuations.  Arrow keys walk through them.
export function prefixTree(nodes, onVisit) {
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
  const scale = WIDTH / Math.max(...ends, 1);
  const hottest = Math.max(...nodes.map((node) => node.hits), 1);
  const svg = element("svg", {
    viewBox: `0 0 ${WIDTH} ${Math.max(rows, 1) * ROW}`,
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
    const label = element("text", { x: x + 4, y: y + 13 });
    label.textContent = (node.text ?? `${node.tokens || node.host_tokens} tokens`).replace(/\s+/g, " ").slice(0, room);
    group.append(label);
  }
  const visit = () => onVisit(describeNode(node), box.index);
  group.addEventListener("focus", visit);
  group.addEventListener("pointerenter", visit);
  return group;
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

export function describeNode(node) {
  const size = node.tokens ? `${node.tokens} tokens` : `${node.host_tokens} tokens in host memory`;
  const parts = [`${size} from ${node.first_token} on`, `found ${node.hits} times`];
  parts.push(node.locks ? `needed by ${node.locks}` : `idle for ${node.idle_steps} steps`);
  if (node.children) parts.push(`${node.children} continuations`);
  if (node.salted) parts.push("of one client only");
  return parts.join(", ") + (node.text ? `: ${node.text}` : "");
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  return ms < 10 ? `${ms.toFixed(2)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}
