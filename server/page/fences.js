// A text whose fenced code stands in blocks.  A block begins with its opening fence, also before it is closed.

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;

// Shows the text in an element; a longer text of the same beginning only adds to it.
export function showFenced(element, text) {
  const parts = partsOf(text);
  while (element.children.length > parts.length) element.lastChild.remove();
  for (const [index, part] of parts.entries()) {
    const shown = element.children[index] ?? element.appendChild(index % 2 ? block() : document.createElement("span"));
    const before = shown.textContent;
    if (part === before) continue;
    if (part.startsWith(before)) shown.append(part.slice(before.length));
    else shown.textContent = part;
  }
}

// Returns prose and code in turns, beginning with prose; lines that are fences are in neither.
function partsOf(text) {
  const parts = [""];
  let opened = "";
  for (const line of text.split(/(?<=\n)/)) {
    const [, marks, info] = FENCE.exec(line) ?? [];
    if (marks && (opened ? marks.startsWith(opened) && !info.trim() : true)) {
      opened = opened ? "" : marks;
      parts.push("");
    } else parts[parts.length - 1] += line;
  }
  return parts;
}

function block() {
  return Object.assign(document.createElement("code"), { className: "block" });
}
