// Anthropic's client for Node: messages, streams, a tool, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const request = {
  model: "demo",
  max_tokens: 60,
  temperature: 0,
  messages: [{ role: "user", content: "Write a function." }],
};
const whole = await client.messages.create(request);
let text = "";
const stream = client.messages.stream(request).on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.equal(final.usage.output_tokens, whole.usage.output_tokens);

const schema = { type: "object", properties: { city: { enum: ["Paris", "Oslo"] } }, required: ["city"] };
const called = await client.messages.create({
  ...request,
  tools: [{ name: "weather", input_schema: schema }],
  tool_choice: { type: "any" },
});
const use = called.content.find((block) => block.type === "tool_use");
assert.ok(["Paris", "Oslo"].includes(use.input.city));
await assert.rejects(client.messages.create({ ...request, model: "other" }), Anthropic.NotFoundError);
