// Puts the page together: views, theme, key, and the one timer that asks for news.

import { getModels, getStats, hasKey, setKey, takeKey } from "/page/api.js";
import { EngineView } from "/page/engine.js";
import { explainTerms } from "/page/help.js";
import { Load } from "/page/load.js";
import { Playground } from "/page/playground.js";
import { agoOf } from "/page/svg.js";
import { Tour } from "/page/tour.js";

const byId = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const THEME = "callboard-theme";

takeKey();
let model = "";
let chosen = null; // of several models and adapters, as the server lists it
let models = null; // until the server has said which there are
let timer = null;
let seenAt = null; // when the server last answered
let lost = false; // it does not answer now: what is shown is of then
const engine = new EngineView(() => shown());
const playground = new Playground(named, askForKey);
const load = new Load(named);
new Tour(() => load.start());
explainTerms(document);

// ---- theme ----

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light theme" : "Dark theme";
}

const wished = localStorage.getItem(THEME);
const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(wished ? wished === "dark" : system.matches);
system.addEventListener("change", () => localStorage.getItem(THEME) ?? setTheme(system.matches));
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem(THEME, dark ? "dark" : "light");
  setTheme(dark);
  refresh();
});

// ---- views ----

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  refresh();
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
}

// ---- key ----

function askForKey() {
  byId("key-form").hidden = false;
  byId("main").hidden = true;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-error").textContent = "";
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  await refresh();
  if (byId("main").hidden) byId("key-error").textContent = "That key was not accepted.";
});

// ---- which of several models ----

// An adapter runs in the engine of its model, so that is what is shown.
const shown = () => chosen?.parent || chosen?.id || "";

byId("models").addEventListener("change", () => {
  chosen = models[byId("models").selectedIndex];
  model = chosen.id;
  byId("model").textContent = "";
  refresh();
});

async function offerModels() {
  models = await getModels().catch(() => null);
  if (models === null || models.length < 2) return;
  byId("models").replaceChildren(...models.map((one) => new Option(one.id)));
  chosen = models[0];
  byId("models").value = model = chosen.id;
  byId("models").hidden = false;
}

// ---- news ----

// The name to ask for; where the server has not said it yet, it is asked first.
async function named() {
  if (!model) await refresh();
  return model;
}

async function refresh() {
  clearTimeout(timer);
  if (models === null) await offerModels();
  const stats = await getStats(shown()).catch(refused);
  // The other view only shows whether the server is there; a lost one is looked for.
  const wait = byId("engine").hidden && !lost ? 10 * EVERY_MS : EVERY_MS;
  clearTimeout(timer); // another look may have begun meanwhile
  if (!document.hidden && !byId("main").hidden) timer = setTimeout(refresh, wait);
  if (stats) show(stats);
}

// Dims what a server that does not answer showed last.
function setLost(value) {
  lost = value;
  document.body.classList.toggle("lost", lost);
  if (!lost) seenAt = Date.now();
  byId("seen").textContent = lost && seenAt !== null ? `last seen ${agoOf((Date.now() - seenAt) / 1000)} ago` : "";
}

function show(stats) {
  setLost(false);
  if (chosen && shown() !== stats.model) return; // asked before another one was chosen
  model = chosen?.id ?? stats.model;
  const name = chosen ? "" : stats.model;
  byId("model").textContent = [name, stats.about].filter(Boolean).join(", ");
  playground.offer(stats.about !== "");
  byId("version").textContent = `callboard ${stats.version}`;
  byId("links").hidden = hasKey(); // a link brings no key
  setStatus(stats.loading || stats.status.replaceAll("_", " "), stats.status === "ready");
  if (!byId("engine").hidden) engine.show(stats);
}

function refused(error) {
  if (error.status === 401) askForKey();
  const words = { 401: "needs a key", 403: "operators only", ...(chosen ? { 503: "not loaded" } : {}) };
  setLost(!(error.status in words));
  setStatus(words[error.status] ?? "no answer", false);
}

function setStatus(text, good) {
  const pill = byId("status");
  if (pill.textContent !== text) pill.textContent = text;
  pill.classList.toggle("good", good);
  pill.classList.toggle("bad", !good);
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
select(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
