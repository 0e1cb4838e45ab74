// Vercel's AI SDK with one provider: text, an object, a forced call of the tiny model, and a loop over the scripted engine.
// Prints nothing; what fails is thrown. Run in the folder whose node_modules has the packages:
//   node ai_sdk.mjs PROVIDER URL_OF_THE_MODEL URL_OF_THE_SCRIPT

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [provider, modelURL, scriptURL] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, stepCountIs, Output } = await load("ai");
const { z } = await load("zod");

const NAME = "talker";
const PROVIDERS = {
  "@ai-sdk/openai": async (url) => (await load(provider)).createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(NAME),
  "@ai-sdk/openai-compatible": async (url) =>
    (await load(provider)).createOpenAICompatible({
      name: "atom",
      baseURL: `${url}/v1`,
      apiKey: "none",
      supportsStructuredOutputs: true,
    })(NAME),
  "@ai-sdk/anthropic": async (url) =>
    (await load(provider)).createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(NAME),
  "@ai-sdk/open-responses": async (url) =>
    (await load(provider)).createOpenResponses({ name: "atom", url: `${url}/v1/responses` })(NAME),
};
const prompt = "Which animal?";
const animal = z.object({ kind: z.enum(["cat", "dog"]), isTame: z.boolean() });

async function tryModel(model) {
  const stream = streamText({ model, prompt, maxOutputTokens: 8 });
  const finished = await stream.finishReason;
  assert.ok(["length", "stop"].includes(finished), `the stream ended with ${finished}`);

  const made = await generateText({ model, prompt, maxOutputTokens: 400, output: Output.object({ schema: animal }) });
  assert.ok(["cat", "dog"].includes(made.output.kind), JSON.stringify(made.output));

  const note = tool({ description: "Notes an animal.", inputSchema: animal });
  const forced = await generateText({
    model,
    prompt,
    maxOutputTokens: 400,
    tools: { note },
    toolChoice: { type: "tool", toolName: "note" },
  });
  assert.equal(forced.toolCalls[0]?.toolName, "note", `no call in ${JSON.stringify(forced.content)}`);
}

async function tryLoop(model) {
  const sums = [];
  const add = tool({
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.int(), b: z.int(), labels: z.record(z.string(), z.string()).optional() }),
    execute: ({ a, b }) => {
      sums.push(a + b);
      return { sum: a + b };
    },
  });
  const asked = { model, prompt: "What is 2 + 3?", tools: { add }, stopWhen: stepCountIs(4) };
  assert.equal((await generateText(asked)).text, "It is 5.");
  let streamed = "";
  for await (const piece of streamText(asked).textStream) streamed += piece;
  assert.equal(streamed, "It is 5.");
  assert.deepEqual(sums, [5, 5]);
}

const make = PROVIDERS[provider];
await tryModel(await make(modelURL));
await tryLoop(await make(scriptURL));
