// As much of a browser's page as the playground needs, for Node: elements by their ids, and modules below /page/.

import { register } from "node:module";

const page = new URL("../../../server/page/", import.meta.url).href;
const hook = `export const resolve = (name, context, next) =>
  name.startsWith("/page/") ? { url: "${page}" + name.slice(6), format: "module", shortCircuit: true } : next(name, context);`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);

class Element extends EventTarget {
  constructor(tag) {
    super();
    Object.assign(this, { tag, children: [], value: "", parent: null, classList: { toggle() {} } });
  }

  append(...all) {
    for (const one of all) if (one instanceof Element) one.parent = this;
    this.children.push(...all);
  }

  appendChild(one) {
    this.append(one);
    return one;
  }

  before(...all) {
    for (const one of all) one.parent = this.parent;
    this.parent.children.splice(this.parent.children.indexOf(this), 0, ...all);
  }

  replaceChildren(...all) {
    this.children = [];
    this.append(...all);
  }

  remove() {
    if (this.parent) this.parent.children = this.parent.children.filter((one) => one !== this);
  }

  querySelectorAll(tag) {
    const inside = this.children.filter((one) => one instanceof Element);
    return inside.flatMap((one) => [...(one.tag === tag ? [one] : []), ...one.querySelectorAll(tag)]);
  }

  querySelector() {
    return null;
  }

  setAttribute() {}

  checkValidity() {
    return true;
  }

  set textContent(text) {
    this.children = [text];
  }

  get textContent() {
    return this.children.map((one) => (one instanceof Element ? one.textContent : one)).join("");
  }
}

const ids = new Map();
export const byId = (id) => ids.get(id) ?? ids.set(id, new Element(id)).get(id);
globalThis.document = Object.assign(new EventTarget(), {
  getElementById: byId,
  createElement: (tag) => new Element(tag),
  querySelector: () => ({ value: "chat", checked: true }),
  querySelectorAll: () => [],
});
globalThis.localStorage = globalThis.sessionStorage = { getItem: () => null, setItem() {} };
globalThis.location = { origin: "http://here" };
globalThis.FileReader = class extends EventTarget {
  readAsDataURL(file) {
    this.result = `data:${file.type};base64,${file.base64}`;
    queueMicrotask(() => this.dispatchEvent(new Event("load")));
  }
};
