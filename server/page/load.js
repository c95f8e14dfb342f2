// "Make load": a few dozen short requests to this server, with three beginnings that they share, and no more.

import { post } from "/page/api.js";

const byId = (id) => document.getElementById(id);
const NUM_CALLS = 12;
const AT_ONCE = 4; // browsers keep six connections to a host, and the page needs one
const PROMPTS_EACH = 4;
const NUM_REQUESTS = NUM_CALLS * PROMPTS_EACH;
const BEGINNINGS = [
  "You are the conductor of a small railway. You answer every traveller in one friendly sentence, you know all the " +
    "timetables by heart, and you never promise a train that does not run. A traveller comes to your window and asks:\n",
  "def read_timetable(path):\n    \"\"\"Read lines of departures, each with a time, a train and a platform.\"\"\"\n" +
    "    departures = []\n    with open(path) as file:\n        for line in file:\n            departures.append(line.split())\n" +
    "    return departures\n\n\n",
  "The station clock had stopped at a quarter past four, and nobody had noticed, since the trains had stopped as well. " +
    "On the platform stood a woman with a birdcage, a boy with a trumpet, and a man who counted the tiles.\n",
];
const ENDINGS = [
  "When does the night train leave?", "Is there a dining car?", "Which platform is mine?", "def next_train(departures):",
  "def late(departures, now):", "class Platform:", "Then the loudspeaker", "It began to rain", "The boy lifted his trumpet",
  "Where may I leave my suitcase?",
];

export class Load {
  #stopping = null;

  // model: resolves to the name to ask for.
  constructor(model) {
    this.model = model;
    byId("load").addEventListener("click", () => (this.#stopping ? this.#stopping.abort() : this.start()));
  }

  async start() {
    if (this.#stopping) return;
    this.#stopping = new AbortController();
    byId("load").textContent = "Stop the load";
    const said = byId("board-said");
    said.textContent = `${NUM_REQUESTS} requests are on their way.`;
    const calls = Array.from({ length: NUM_CALLS }, (_, number) => number);
    const work = async () => {
      for (let number; (number = calls.shift()) !== undefined; ) await this.#ask(number, this.#stopping.signal);
    };
    try {
      await Promise.all(Array.from({ length: AT_ONCE }, work));
      said.textContent = `${NUM_REQUESTS} requests have been answered.`;
    } catch (error) {
      said.textContent = error.name === "AbortError" ? "The load was stopped." : error.message;
      this.#stopping.abort();
    } finally {
      this.#stopping = null;
      byId("load").textContent = "Make load";
    }
  }

  async #ask(number, signal) {
    const places = Array.from({ length: PROMPTS_EACH }, (_, index) => number * PROMPTS_EACH + index);
    const prompt = places.map((place) => BEGINNINGS[place % BEGINNINGS.length] + ENDINGS[(place * 7) % ENDINGS.length]);
    const body = { model: await this.model(), prompt, max_tokens: 96 + 48 * (number % 4), temperature: 0.8, seed: number, ignore_eos: true };
    await (await post("/v1/completions", body, signal)).text();
  }
}
