// OpenAI's client for Node: chat, streams, tools, objects, responses, text, embeddings, models, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const request = {
  model: "demo",
  temperature: 0,
  max_tokens: 60,
  messages: [{ role: "user", content: "Write a function." }],
};
const Trip = z.object({ city: z.enum(["Paris", "Oslo"]) });

const whole = await client.chat.completions.create(request);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

const called = [];
const runner = client.chat.completions.runTools({
  ...request,
  tool_choice: { type: "function", function: { name: "weather" } },
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parse: JSON.parse,
        parameters: {
          type: "object",
          properties: { city: { enum: ["Paris", "Oslo"] } },
          required: ["city"],
          additionalProperties: false,
        },
        function: ({ city }) => (called.push(city), `rain in ${city}`),
      },
    },
  ],
});
await runner.done();
assert.ok(["Paris", "Oslo"].includes(called[0]));

const parsed = await client.chat.completions.parse({ ...request, response_format: zodResponseFormat(Trip, "trip") });
assert.ok(Trip.safeParse(parsed.choices[0].message.parsed).success);

const asked = { model: "demo", input: "Write a function.", temperature: 0, max_output_tokens: 60 };
const response = await client.responses.create(asked);
const events = client.responses.stream(asked);
let streamed = "";
events.on("response.output_text.delta", (event) => (streamed += event.delta));
await events.finalResponse();
assert.equal(streamed, response.output_text);

const completion = await client.completions.create({ model: "demo", prompt: "def add(a, b):\n", max_tokens: 8 });
assert.ok(completion.choices[0].text.length > 0);
const embeddings = await client.embeddings.create({ model: "demo", input: ["one", "two"] });
assert.equal(embeddings.data.length, 2);
assert.ok(embeddings.data[0].embedding.length > 0);
assert.equal((await client.models.list()).data[0].id, "demo");
await assert.rejects(client.chat.completions.create({ ...request, temperature: -1 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ ...request, model: "other" }), OpenAI.NotFoundError);
