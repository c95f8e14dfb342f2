// Vercel's AI SDK: text, streams, a tool that it runs itself, objects.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "callboard",
  baseURL: process.env.BASE_URL,
  supportsStructuredOutputs: true,
});
const request = { model: provider("demo"), temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const City = z.object({ city: z.enum(["Paris", "Oslo"]) });

const whole = await generateText({ ...request, prompt: "Write a function." });
assert.ok(whole.text.length > 0);
assert.ok(whole.usage.outputTokens > 0);
let text = "";
const stream = streamText({ ...request, prompt: "Write a function." });
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);

const called = [];
const weather = tool({
  description: "The weather in a city.",
  inputSchema: City,
  execute: async ({ city }) => (called.push(city), `rain in ${city}`),
});
for (const call of [generateText, streamText]) {
  const answer = await call({
    ...request,
    tools: { weather },
    toolChoice: "required",
    providerOptions: { callboard: { parallel_tool_calls: false } },
    prompt: "The weather?",
  });
  const [result] = await answer.toolResults; // of a stream, a promise
  assert.equal(result.toolName, "weather");
  assert.match(result.output, /^rain in (Paris|Oslo)$/);
}
assert.ok(called.length >= 2);

const { output } = await generateText({ ...request, output: Output.object({ schema: City }), prompt: "A trip." });
assert.ok(City.safeParse(output).success);
