// The playground: a conversation or a completion that streams.

import { stream } from "/page/api.js";
import { showFenced } from "/page/fences.js";
import { isVideo, Pictures, thumbnail } from "/page/pictures.js";
import { copyButton, snippets } from "/page/snippets.js";

const byId = (id) => document.getElementById(id);
const MONO = "callboard-mono";
const SAMPLES = [
  ["chat", "What is the capital of France?"],
  ["chat", "Explain in two sentences why the sky is blue."],
  ["chat", "Write a Python function that adds two numbers."],
  ["completion", "def fibonacci(n):"],
];
// The demo model knows what it was taught and nothing else.
const SAMPLES_OF_A_TOY = [
  ["chat", "What is a page?"],
  ["chat", "What is a radix tree?"],
  ["chat", "Write a function that adds two numbers."],
  ["completion", "def fibonacci(n):"],
];

export class Playground {
  #model = async () => "";
  #turns = [];
  #running = null;
  #samples = null;
  #pictures = new Pictures(byId("ask"), byId("pictures"));

  // model: resolves to the name to ask for.  onRefused: called at errors that are about the key.
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
    this.offer(false); // until the server has said what it serves
    byId("mono").checked = localStorage.getItem(MONO) === "yes";
    byId("mono").addEventListener("change", () => this.#setFont());
    this.#setFont();
  }

  // Shows prompts that suit the model.
  offer(isToy) {
    const samples = isToy ? SAMPLES_OF_A_TOY : SAMPLES;
    if (samples === this.#samples) return;
    this.#samples = samples;
    byId("samples").replaceChildren(...samples.map(([mode, text]) => this.#sample(mode, text)));
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
    this.#pictures.take();
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
    for (const one of byId("log").querySelectorAll(".hint, .go-on")) one.remove();
    const turns = this.#turns;
    const question = this.isChat ? new Turn("You", "mine") : null;
    const pictures = question ? this.#pictures.take() : [];
    if (question) turns.push({ role: "user", content: asContent(text, pictures) });
    question?.show(pictures);
    question?.add(text);
    const answer = question ? new Turn("Model", "") : this.#openCompletion(text);
    byId("prompt").value = "";
    if (await this.#ask(answer)) return;
    // Nothing came: the question goes back to where it was typed.
    if (question) turns.pop();
    question?.remove();
    answer.remove();
    byId("prompt").value = text;
    for (const url of pictures) this.#pictures.add(url);
  }

  #openCompletion(text) {
    const turn = new Turn("Completion", "raw");
    turn.showPrompt(text);
    return turn;
  }

  // Streams into an answer, or on where it was cut.  Returns false if that failed and the answer has no text.
  async #ask(answer) {
    const turns = this.isChat ? this.#turns : null; // "Start over" begins new ones meanwhile
    const goesOn = turns?.at(-1).role === "assistant";
    byId("play-error").textContent = "";
    this.#setRunning(new AbortController());
    let failed = false;
    try {
      const model = await this.#model();
      await this.#read(answer, ...(turns ? this.#chat(model, turns, goesOn) : this.#completion(model, answer)));
    } catch (error) {
      failed = error.name !== "AbortError";
      if (failed) byId("play-error").textContent = error.message;
      else answer.note("stopped");
      if (error.status === 401) this.onRefused();
    } finally {
      if (goesOn) turns.at(-1).content = answer.text;
      else if (answer.text) turns?.push({ role: "assistant", content: answer.text });
      this.#setRunning(null);
    }
    return !failed || answer.text !== "";
  }

  #chat(model, turns, goesOn) {
    const instructions = byId("system").value.trim();
    const opening = instructions ? [{ role: "system", content: instructions }] : [];
    const end = goesOn ? { continue_final_message: true } : {};
    return ["/v1/chat/completions", { ...this.#body(model), messages: [...opening, ...turns], ...end }];
  }

  #completion(model, answer) {
    return ["/v1/completions", { ...this.#body(model), prompt: answer.prompt + answer.text }];
  }

  #body(model) {
    const settings = { model };
    for (const id of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (byId(id).value !== "" && byId(id).checkValidity()) settings[id] = Number(byId(id).value);
    }
    return settings;
  }

  async #read(answer, path, body) {
    byId("snippets").replaceChildren(...snippets(path, body));
    byId("code").hidden = false;
    const began = performance.now();
    let first = null;
    let wasCut = false;
    for await (const chunk of stream(path, body, this.#running.signal)) {
      const [choice] = chunk.choices;
      if (choice) {
        first ??= performance.now();
        wasCut ||= choice.finish_reason === "length";
        answer.think(choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "");
        answer.add(choice.delta ? (choice.delta.content ?? "") : choice.text);
      }
      if (chunk.usage) answer.note((wasCut ? "cut at " : "") + describe(chunk.usage, began, first, performance.now()));
    }
    if (wasCut && answer.text) answer.offerMore(() => this.#running || this.#ask(answer));
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

  show(pictures) {
    this.body.before(...pictures.map(thumbnail));
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
    if (this.prompt) this.body.append(text);
    else showFenced(this.body, this.text);
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
    this.element.querySelector(".go-on")?.remove();
  }

  offerMore(onClick) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy go-on", textContent: "Go on" });
    button.addEventListener("click", onClick);
    this.#footer.after(button);
  }

  remove() {
    this.element.remove();
  }
}

function asContent(text, pictures) {
  if (!pictures.length) return text;
  const kind = (url) => (isVideo(url) ? "video_url" : "image_url");
  return [...pictures.map((url) => ({ type: kind(url), [kind(url)]: { url } })), { type: "text", text }];
}

function describe(usage, began, first, last) {
  const count = usage.completion_tokens;
  const parts = [`${count} tokens`, `first after ${Math.round((first ?? last) - began)} ms`];
  if (first !== null && count > 1 && last > first) parts.push(`${(((count - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} of it cached` : ""}`);
  return parts.join(" · ");
}
