// The playground: a conversation or a completion that streams.

import { stream } from "/page/api.js";
import { copyButton, snippets } from "/page/snippets.js";

const byId = (id) => document.getElementById(id);
const MONO = "callboard-mono";
const SAMPLES = [
  ["chat", "What is a page?"],
  ["chat", "What is a radix tree?"],
  ["chat", "Write a function that adds two numbers."],
  ["completion", "def fibonacci(n):"],
];

export class Playground {
  #model = () => "";
  #turns = [];
  #running = null;

  // model: gives the name to ask for.  onRefused: told of errors that are about the key.
  constructor(model, onRefused) {
    this.#model = model;
    this.onRefused = onRefused;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    for (const radio of document.querySelectorAll("[name=mode]")) {
      radio.addEventListener("change", () => this.clear());
    }
    byId("samples").append(...SAMPLES.map(([mode, text]) => this.#sample(mode, text)));
    byId("mono").checked = localStorage.getItem(MONO) === "yes";
    byId("mono").addEventListener("change", () => this.#setFont());
    this.#setFont();
  }

  #sample(mode, text) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: `sample ${mode}`, textContent: text });
    button.addEventListener("click", () => {
      if (this.#running) return;
      const radio = document.querySelector(`[name=mode][value=${mode}]`);
      if (!radio.checked) {
        radio.checked = true;
        this.clear();
      }
      byId("prompt").value = text;
      this.send();
    });
    return button;
  }

  #setFont() {
    localStorage.setItem(MONO, byId("mono").checked ? "yes" : "no");
    byId("log").classList.toggle("mono", byId("mono").checked);
  }

  get isChat() {
    return document.querySelector("[name=mode]:checked").value === "chat";
  }

  clear() {
    this.stop();
    this.#turns = [];
    byId("log").replaceChildren();
    byId("play-error").textContent = "";
    byId("system").closest("label").hidden = !this.isChat;
    byId("prompt").placeholder = this.isChat ? "Your message" : "Text to go on from";
    byId("prompt").focus();
  }

  stop() {
    this.#running?.abort();
  }

  async send() {
    const text = byId("prompt").value;
    if (this.#running || !text) return;
    byId("play-error").textContent = "";
    byId("log").querySelector(".hint")?.remove();
    const answer = this.isChat ? this.#openChat(text) : this.#openCompletion(text);
    byId("prompt").value = "";
    this.#setRunning(new AbortController());
    try {
      await this.#read(answer);
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(error, text, answer);
      else answer.note("stopped");
    } finally {
      if (this.isChat && answer.text) this.#turns.push({ role: "assistant", content: answer.text });
      this.#setRunning(null);
    }
  }

  #openChat(text) {
    this.#turns.push({ role: "user", content: text });
    new Turn("You", "mine").add(text);
    return new Turn("Model", "");
  }

  #openCompletion(text) {
    const turn = new Turn("Completion", "raw");
    turn.showPrompt(text);
    return turn;
  }

  #body() {
    const settings = { model: this.#model() };
    for (const id of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (byId(id).value !== "" && byId(id).checkValidity()) settings[id] = Number(byId(id).value);
    }
    return settings;
  }

  async #read(answer) {
    const instructions = byId("system").value.trim();
    const opening = instructions ? [{ role: "system", content: instructions }] : [];
    const [path, body] = this.isChat
      ? ["/v1/chat/completions", { ...this.#body(), messages: [...opening, ...this.#turns] }]
      : ["/v1/completions", { ...this.#body(), prompt: answer.prompt }];
    byId("snippets").replaceChildren(...snippets(path, body));
    byId("code").hidden = false;
    const began = performance.now();
    let first = null;
    for await (const chunk of stream(path, body, this.#running.signal)) {
      const [choice] = chunk.choices;
      if (choice) {
        first ??= performance.now();
        answer.think(choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "");
        answer.add(choice.delta ? (choice.delta.content ?? "") : choice.text);
      }
      if (chunk.usage) answer.note(describe(chunk.usage, began, first, performance.now()));
    }
  }

  #fail(error, text, answer) {
    byId("play-error").textContent = error.message;
    if (!answer.text) {
      // Nothing came: the question goes back to where it was typed.
      answer.remove();
      if (this.isChat) this.#turns.pop();
      byId("prompt").value = text;
    }
    if (error.status === 401) this.onRefused();
  }

  #setRunning(controller) {
    this.#running = controller;
    byId("send").disabled = controller !== null;
    byId("stop").disabled = controller === null;
    byId("log").setAttribute("aria-busy", String(controller !== null));
  }
}

// One entry of the log.
class Turn {
  #footer = null;
  #thoughts = null;

  constructor(who, kind) {
    this.text = "";
    this.prompt = "";
    this.element = document.createElement("article");
    this.element.className = `turn ${kind}`;
    const heading = document.createElement("h3");
    heading.textContent = who;
    this.body = document.createElement("pre");
    this.element.append(heading, this.body);
    byId("log").append(this.element);
  }

  showPrompt(text) {
    this.prompt = text;
    const span = document.createElement("span");
    span.className = "prompt-text";
    span.textContent = text;
    this.body.append(span);
  }

  think(text) {
    if (!text) return;
    if (!this.#thoughts) {
      this.#thoughts = document.createElement("pre");
      this.#thoughts.className = "thoughts";
      this.body.before(this.#thoughts);
    }
    this.#thoughts.append(text);
  }

  add(text) {
    if (!text) return;
    const log = byId("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.text += text;
    this.body.append(text);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  note(text) {
    if (!this.#footer) {
      this.#footer = document.createElement("span");
      const footer = document.createElement("footer");
      footer.append(this.#footer, copyButton(() => this.prompt + this.text, "the answer"));
      this.element.append(footer);
    }
    this.#footer.textContent = text;
  }

  remove() {
    this.element.remove();
  }
}

function describe(usage, began, first, last) {
  const count = usage.completion_tokens;
  const parts = [`${count} tokens`, `first after ${Math.round((first ?? last) - began)} ms`];
  if (first !== null && count > 1 && last > first) parts.push(`${(((count - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} of it cached` : ""}`);
  return parts.join(" · ");
}
