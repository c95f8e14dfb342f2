// A line of help for each of the engine's words: shown on hover and on focus, gone with Escape.

const TERMS = {
  actor: "A part of the engine with its own state. Actors share nothing; they send each other messages.",
  mailbox: "The queue of messages that an actor has not read yet. Empty means that it keeps up.",
  page: "A piece of the KV cache for a few tokens. Requests get memory by whole pages.",
  pool: "All memory for keys and values: a fixed number of pages, given to requests and taken back.",
  "prefix cache": "Pages of earlier prompts and answers, kept to be found again when a prompt begins with the same tokens.",
  "radix tree": "How prefixes are found: a tree of token sequences, where branches that begin alike share their pages.",
  step: "One pass of the model over all running requests. Each step gives every decoding request one token.",
  decode: "Making the answer: one token for each request in each step.",
  prefill: "Reading the prompt before the first token of the answer, in chunks if it is long.",
  cached: "How much of the prompt was found in the prefix cache and needed no computing.",
  "first token": "The time from a request's arrival to the first token of its answer (TTFT). p99: 99 of 100 were faster.",
  "between tokens": "The time between two tokens of one answer (inter-token latency). p99: 99 of 100 were faster.",
  running: "Requests that have a row in the batch: they are computed in each step.",
  waiting: "Requests that have arrived and found no room yet.",
  output: "Tokens of answers per second, of all requests together.",
  prompts: "Tokens of prompts computed per second; cached ones are not computed.",
  ended: "Requests that have left, whether they finished, were aborted or failed.",
  state: "WAITING for room, PREFILL while the prompt is read (chunk of chunks), DECODING, RETRACTED if it lost its pages.",
  tokens: "Tokens of the answer so far.",
  speed: "Tokens per second of this request since its first token.",
};

const bubble = Object.assign(document.createElement("div"), { id: "help", className: "help", hidden: true });
bubble.setAttribute("role", "tooltip");
document.body.append(bubble);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") bubble.hidden = true;
});

// Makes a button of every element that names a term.
export function explainTerms(root) {
  for (const place of root.querySelectorAll("[data-term]")) place.replaceWith(term(place.dataset.term, place.textContent));
}

export function term(name, text = name) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "term", textContent: text });
  button.dataset.term = name;
  const show = () => {
    bubble.textContent = TERMS[name];
    bubble.hidden = false;
    button.setAttribute("aria-describedby", "help");
    place(button);
  };
  const hide = () => {
    bubble.hidden = true;
    button.removeAttribute("aria-describedby");
  };
  button.addEventListener("focus", show);
  button.addEventListener("click", show);
  button.addEventListener("pointerenter", show);
  button.addEventListener("blur", hide);
  button.addEventListener("pointerleave", () => document.activeElement === button || hide());
  return button;
}

function place(button) {
  const at = button.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - bubble.offsetWidth - 8));
  const below = at.bottom + bubble.offsetHeight + 12 < innerHeight;
  bubble.style.setProperty("left", `${left + scrollX}px`);
  bubble.style.setProperty("top", `${scrollY + (below ? at.bottom + 6 : at.top - bubble.offsetHeight - 6)}px`);
}
