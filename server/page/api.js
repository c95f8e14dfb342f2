// What the server is asked, and how its streams are read.  The key stays in this tab and goes into no URL.

const KEY = "callboard-key";
const PATIENCE_MS = 10_000; // with a server that takes a connection and sends nothing

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// A server on a laptop prints the page's address with a key behind it, which no browser sends anywhere.
export function takeKey() {
  const found = /^#key=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  setKey(found[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const asked = fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  const response = await asked.catch((error) => lost(error, "the server does not answer"));
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not one of our own errors: a proxy's page, perhaps.
  }
  throw new ApiError(response.status, message);
}

// Browsers have words of their own for a connection that failed.  An answer that was stopped has not failed.
function lost(error, message) {
  throw error.name === "AbortError" ? error : new ApiError(0, message);
}

// model: of several; empty for the only one, or the first that is loaded.
export async function getStats(model) {
  const path = model ? `/stats?model=${encodeURIComponent(model)}` : "/stats";
  return (await call(path, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
}

export async function getSessions(model) {
  const path = model ? `/sessions?model=${encodeURIComponent(model)}` : "/sessions";
  return (await call(path, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
}

export async function getExplanation(id, model) {
  const path = `/explain/${encodeURIComponent(id)}`;
  return (await call(model ? `${path}?model=${encodeURIComponent(model)}` : path)).json();
}

export async function getModels() {
  return (await (await call("/v1/models")).json()).data;
}

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// The events of a streamed answer.  Ends by itself, by an error in the stream, or when the signal is raised.
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => lost(error, "the connection was lost"));
    if (done) throw new ApiError(0, "the connection was lost");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));  // an id may be before it
      if (!line) continue;  // a ping
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error.message);
      yield chunk;
    }
  }
}
