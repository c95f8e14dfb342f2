// The table of sessions: a line for each, hidden where there are none or none may be seen.

import assert from "node:assert";
import { byId } from "./fake_page.mjs";

const one = { client: "key", name: "s", num_requests: 3, num_open: 0, prompt_tokens: 200, cached_tokens: 190, idle_s: 7.4, leased_pages: 12, lease_s: 40.2 };
let answer = { sessions: [one, { ...one, name: "t", num_open: 1, leased_pages: 0, lease_s: 0, prompt_tokens: 0, cached_tokens: 0 }] };
globalThis.fetch = async (path) => {
  assert.equal(path, "/sessions?model=m");
  return answer ? new Response(JSON.stringify(answer)) : new Response("{}", { status: 403 });
};

const { Sessions } = await import("/page/sessions.js");
const sessions = new Sessions(() => "m");
await sessions.refresh();
assert.equal(byId("sessions-panel").hidden, false);
const lines = byId("sessions").querySelectorAll("tr").map((line) => line.querySelectorAll("td").map((cell) => cell.textContent));
assert.deepEqual(lines, [
  ["s", "key", "3", "7 s ago", "190", "95.0 %", "12 pages, 41 s"],
  ["t", "key", "3", "1 running", "0", "–", "–"],
]);
answer = { sessions: Array(23).fill(one) };
await sessions.refresh();
assert.equal(byId("sessions").children.length, 20);
assert.equal(byId("sessions-about").textContent, "and 3 more");
answer = null;
await sessions.refresh();
assert.equal(byId("sessions-panel").hidden, true);
