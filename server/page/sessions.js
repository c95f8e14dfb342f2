// The sessions: what each one found in the cache, and what it holds there.

import { getSessions } from "/page/api.js";
import { whole } from "/page/svg.js";

const byId = (id) => document.getElementById(id);
const MOST = 20;

export class Sessions {
  // model: returns which of several is shown.
  constructor(model) {
    this.model = model;
  }

  // Asks for them.  A server without sessions shows none, and a client sees its own alone.
  async refresh() {
    const { sessions } = await getSessions(this.model()).catch(() => ({ sessions: [] }));
    byId("sessions-panel").hidden = !sessions.length;
    byId("sessions").replaceChildren(...sessions.slice(0, MOST).map(line));
    byId("sessions-about").textContent = sessions.length > MOST ? `and ${whole(sessions.length - MOST)} more` : "";
  }
}

function line(one) {
  const share = one.prompt_tokens ? `${((100 * one.cached_tokens) / one.prompt_tokens).toFixed(1)} %` : "–";
  const held = one.leased_pages ? `${whole(one.leased_pages)} pages, ${Math.ceil(one.lease_s)} s` : "–";
  const running = one.num_open ? `${one.num_open} running` : `${Math.round(one.idle_s)} s ago`;
  const made = document.createElement("tr");
  for (const text of [one.name, one.client, whole(one.num_requests), running, whole(one.cached_tokens), share, held]) {
    const cell = document.createElement("td");
    cell.textContent = text;
    made.append(cell);
  }
  return made;
}
