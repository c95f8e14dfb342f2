// Puts the page together: views, theme, key, and the one timer that asks for news.

import { getStats, setKey } from "/page/api.js";
import { EngineView } from "/page/engine.js";
import { Playground } from "/page/playground.js";

const byId = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const THEME = "callboard-theme";

let model = "";
let timer = null;
const engine = new EngineView();
new Playground(() => model, askForKey);

// ---- theme ----

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
}

const wished = localStorage.getItem(THEME);
const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(wished ? wished === "dark" : system.matches);
system.addEventListener("change", () => localStorage.getItem(THEME) ?? setTheme(system.matches));
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem(THEME, dark ? "dark" : "light");
  setTheme(dark);
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

// ---- news ----

async function refresh() {
  clearTimeout(timer);
  try {
    const stats = await getStats();
    model = stats.model;
    byId("model").textContent = stats.about ? `${stats.model}, ${stats.about}` : stats.model;
    setStatus(stats.status.replaceAll("_", " "), stats.status === "ready");
    if (!byId("engine").hidden) engine.show(stats);
  } catch (error) {
    if (error.status === 401) {
      setStatus("needs a key", false);
      askForKey();
      return;
    }
    setStatus("no answer", false);
  }
  // Who looks at the other view only wants to know that the server is there.
  const wait = byId("engine").hidden ? 10 * EVERY_MS : EVERY_MS;
  if (!document.hidden) timer = setTimeout(refresh, wait);
}

function setStatus(text, good) {
  const pill = byId("status");
  if (pill.textContent !== text) pill.textContent = text;
  pill.classList.toggle("good", good);
  pill.classList.toggle("bad", !good);
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
select(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
