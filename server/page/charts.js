// Charts with axes: the last steps, the last minutes, and a line without any.

import { element, milliseconds, titled, whole } from "/page/svg.js";

const HEIGHT = 200;
const LEFT = 46;
const BOTTOM = 34;
const TOP = 10;
const RIGHT = 8;
const MOST_STEPS = 128;
const SPAN_S = 5;
const MINUTES = 10;

export function sparkline(values) {
  const most = Math.max(...values, 1);
  const points = values.map((value, index) => `${index},${(30 - (28 * value) / most).toFixed(1)}`);
  const width = Math.max(values.length - 1, 1);
  const svg = element("svg", { class: "spark", viewBox: `0 0 ${width} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(element("path", { d: points.length > 1 ? `M${points.join("L")}` : "" }));
  return svg;
}

// A bar for each step, as high as it took long; its parts as large as their tokens' share.  width: in pixels.
export function stepChart(steps, width) {
  const shown = steps.slice(-MOST_STEPS);
  const longest = Math.max(...shown.map((step) => step.seconds), 1e-4);
  const frame = new Frame(width, niceCeiling(longest * 1000), "ms", `The last ${shown.length} steps; the longest took ${milliseconds(longest)}`);
  const pitch = frame.plotWidth / Math.max(shown.length, 32);
  for (const [index, step] of shown.entries()) {
    const height = Math.max(1.5, frame.heightOf(step.seconds * 1000));
    const share = step.prefill_tokens / Math.max(1, step.prefill_tokens + step.decodes);
    const x = LEFT + index * pitch;
    const bar = (kind, y, part) => element("rect", { class: kind, x, y, width: Math.max(1, pitch - 1), height: part });
    const about = `step ${step.id}: ${milliseconds(step.seconds)}, ${step.decodes} decoding, ` +
      `${step.prefill_tokens} prompt tokens of ${step.prefills} requests`;
    const group = element("g", { class: "bar" }, titled(about), bar("prefill", frame.bottom - height, height * share));
    group.append(bar("decode", frame.bottom - height * (1 - share), height * (1 - share)));
    frame.svg.append(group);
    if (index % 32 === 0) frame.label(x, whole(step.id));
  }
  frame.caption("step number");
  return frame.svg;
}

// Tokens per second over the last minutes.  history: as /stats has it.
export function historyChart(history, width) {
  const num = (MINUTES * 60) / SPAN_S;
  const output = new Array(num).fill(0);
  const prompts = new Array(num).fill(0);
  for (const span of history) {
    const covered = Math.min(SPAN_S, SPAN_S + span.age_s);
    const place = num - 1 - Math.floor((span.age_s + SPAN_S) / SPAN_S);
    if (covered < 1 || place < 0 || place >= num) continue;
    output[place] = span.output_tokens / covered;
    prompts[place] = span.prefill_tokens / covered;
  }
  const most = Math.max(...output, ...prompts);
  const frame = new Frame(width, niceCeiling(Math.max(most, 10)), "tok/s", `Tokens per second in ten minutes; at most ${whole(most)}`);
  for (const [kind, values] of [["prefill", prompts], ["decode", output]]) {
    const at = (index) => LEFT + (frame.plotWidth * index) / (num - 1);
    const points = values.map((value, index) => `${at(index).toFixed(1)},${(frame.bottom - frame.heightOf(value)).toFixed(1)}`);
    frame.svg.append(element("path", { class: `area ${kind}`, d: `M${LEFT},${frame.bottom}L${points.join("L")}L${at(num - 1)},${frame.bottom}Z` }));
    frame.svg.append(element("path", { class: `curve ${kind}`, d: `M${points.join("L")}` }));
  }
  for (const minutes of width < 480 ? [10, 5] : [10, 8, 6, 4, 2]) frame.label(LEFT + frame.plotWidth * (1 - minutes / MINUTES), `−${minutes} min`);
  frame.label(LEFT + frame.plotWidth, "now", "end");
  return frame.svg;
}

// An empty chart with its axes.  most: at its top, in ``unit``.
class Frame {
  constructor(width, most, unit, about) {
    this.most = most;
    this.plotWidth = Math.max(40, width - LEFT - RIGHT);
    this.bottom = HEIGHT - BOTTOM;
    this.svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": about });
    for (const part of [0, 0.5, 1]) {
      const y = this.bottom - this.heightOf(most * part);
      this.svg.append(element("line", { class: "rule", x1: LEFT, x2: LEFT + this.plotWidth, y1: y, y2: y }));
      const text = `${Number((most * part).toPrecision(3)).toLocaleString("en")}${part === 1 ? ` ${unit}` : ""}`;
      this.svg.append(element("text", { class: "tick", x: part === 1 ? 0 : LEFT - 6, y: y + 4, "text-anchor": part === 1 ? "start" : "end" }, text));
    }
  }

  heightOf(value) {
    return ((this.bottom - TOP) * value) / this.most;
  }

  label(x, text, anchor = x <= LEFT + 1 ? "start" : "middle") {
    this.svg.append(element("text", { class: "tick", x, y: this.bottom + 15, "text-anchor": anchor }, text));
  }

  caption(text) {
    this.svg.append(element("text", { class: "tick", x: LEFT + this.plotWidth, y: HEIGHT - 4, "text-anchor": "end" }, text));
  }
}

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].find((factor) => factor * power >= value) * power;
}
