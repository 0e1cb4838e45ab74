// Vercel's AI SDK with one provider: a stream, an object and a forced call of the tiny model; a loop over the scripted
// engine, whole and streamed. What fails is thrown. Run it in the folder whose node_modules has the packages:
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
const atom = { name: "atom", apiKey: "none" };
const PROVIDERS = {
  "@ai-sdk/openai": ({ createOpenAI }, url) => createOpenAI({ ...atom, baseURL: `${url}/v1` }),
  "@ai-sdk/openai-compatible": ({ createOpenAICompatible }, url) =>
    createOpenAICompatible({ ...atom, baseURL: `${url}/v1`, supportsStructuredOutputs: true }),
  "@ai-sdk/anthropic": ({ createAnthropic }, url) => createAnthropic({ ...atom, baseURL: `${url}/v1` }),
  "@ai-sdk/open-responses": ({ createOpenResponses }, url) =>
    createOpenResponses({ ...atom, url: `${url}/v1/responses` }),
};
const providerOptions = { openai: { store: false } }; // else it refers to items that the server should have stored
// a model without sense writes as much space in JSON as the grammar allows
const asked = { prompt: "Which animal?", temperature: 0, maxOutputTokens: 1000 };
const animal = z.object({ kind: z.enum(["cat", "dog"]), isTame: z.boolean() });

async function tryModel(model) {
  const stream = streamText({ model, ...asked, maxOutputTokens: 8 });
  const finished = await stream.finishReason;
  assert.ok(["length", "stop"].includes(finished), `the stream ended with ${finished}`);

  const made = await generateText({ model, ...asked, output: Output.object({ schema: animal }) });
  assert.ok(["cat", "dog"].includes(made.output.kind), JSON.stringify(made.output));

  const note = tool({ description: "Notes an animal.", inputSchema: animal });
  const forced = await generateText({
    model,
    ...asked,
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
  const question = { model, prompt: "What is 2 + 3?", tools: { add }, stopWhen: stepCountIs(4), providerOptions };
  assert.equal((await generateText(question)).text, "It is 5.");
  let streamed = "";
  for await (const piece of streamText(question).textStream) streamed += piece;
  assert.equal(streamed, "It is 5.");
  assert.deepEqual(sums, [5, 5]);
}

const connect = PROVIDERS[provider];
const library = await load(provider);
await tryModel(connect(library, modelURL)(NAME));
await tryLoop(connect(library, scriptURL)(NAME));
