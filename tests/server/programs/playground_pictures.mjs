// Pictures in the playground: dropped, pasted, removed, given back after an error, sent, and shown.

import assert from "node:assert";
import { byId } from "./fake_page.mjs";

const sent = [];
let isRefused = true;
globalThis.fetch = async (path, options) => {
  sent.push(JSON.parse(options.body));
  if (isRefused) return new Response('{"error": {"message": "no"}}', { status: 400 });
  const event = { choices: [{ index: 0, delta: { content: "a cat" }, finish_reason: "stop" }] };
  return new Response(`data: ${JSON.stringify(event)}\n\ndata: [DONE]\n\n`, { headers: { "Content-Type": "text/event-stream" } });
};

function happens(kind, fields) {
  const event = Object.assign(new Event(kind, { cancelable: true }), fields);
  byId("ask").dispatchEvent(event);
  return event.defaultPrevented;
}

const { Playground } = await import("/page/playground.js");
const playground = new Playground(async () => "m", () => {});
const waiting = () => byId("pictures").querySelectorAll("img").map((one) => one.src);

const png = { type: "image/png", base64: "A".repeat(99) };
assert(happens("drop", { dataTransfer: { files: [png, { type: "text/plain", base64: "BBBB" }] } }));
assert(happens("paste", { clipboardData: { files: [{ type: "image/webp", base64: "CCCC" }, { type: "video/mp4", base64: "DDDD" }] } }));
assert(!happens("paste", { clipboardData: { files: [] } }), "text is pasted as ever");
await new Promise((done) => setTimeout(done));
const url = `data:image/png;base64,${png.base64}`;
const video = "data:video/mp4;base64,DDDD";
assert.deepEqual(waiting(), [url, "data:image/webp;base64,CCCC", video]);
byId("pictures").querySelectorAll("button")[1].dispatchEvent(new Event("click"));

byId("prompt").value = "What is it?";
await playground.send();
assert.deepEqual([waiting(), byId("prompt").value], [[url, video], "What is it?"]);
isRefused = false;
await playground.send();
const content = [{ type: "image_url", image_url: { url } }, { type: "video_url", video_url: { url: video } }, { type: "text", text: "What is it?" }];
assert.deepEqual(sent.at(-1).messages, [{ role: "user", content }]);
assert.deepEqual(waiting(), []);
assert.deepEqual(byId("log").querySelectorAll("img").map((one) => one.src), [url, video]);
assert(!byId("snippets").textContent.includes(png.base64), "the code has the picture's beginning alone");
