// AI SDK: generateText, streamText, objects and tools, by chat completions and by responses. Usage: check_ai_sdk.mjs BASE_URL
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2];
const name = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;
const compatible = createOpenAICompatible({
  name: "adaptree",
  baseURL,
  apiKey: "unused",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const models = [compatible(name), createOpenAI({ baseURL, apiKey: "unused" }).responses(name)];
const note = z.object({ kind: z.enum(["question", "answer"]), marks: z.array(z.literal([1, 20, 300])).max(3) });
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

for (const model of models) {
  const options = { model, prompt: "Say something.", temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

  const { text, usage } = await generateText(options);
  assert.ok(text.length > 0);
  assert.ok(usage.outputTokens > 0);
  let streamed = "";
  for await (const piece of streamText(options).textStream) streamed += piece;
  assert.equal(streamed, text);
  console.log("ok text", model.provider);

  const { object } = await generateObject({ ...options, schema: note });
  note.parse(object);
  const partial = streamObject({ ...options, schema: note });
  for await (const _ of partial.partialObjectStream);
  assert.deepEqual(await partial.object, object);
  console.log("ok objects", model.provider);

  const called = await generateText({ ...options, tools: { weather }, toolChoice: "required" });
  assert.ok(called.toolCalls.length >= 1);
  assert.equal(called.toolResults[0].output, `It rains in ${called.toolCalls[0].input.city}.`);
  const stream = streamText({ ...options, tools: { weather }, toolChoice: "required" });
  for await (const _ of stream.fullStream);
  assert.deepEqual((await stream.toolCalls)[0].input, called.toolCalls[0].input);
  console.log("ok tools", model.provider);
}
