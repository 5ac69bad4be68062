// Anthropic's client for Node: its `toolRunner`, whole and streamed.

import Anthropic from '@anthropic-ai/sdk';
import { asked, report, schema } from './outcome.mjs';

const client = new Anthropic({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const tool = { name: 'asked', description: 'Tells.', input_schema: schema, run: asked, parse: (input) => input };
const body = {
  model: 'stub', max_tokens: 500, messages: [{ role: 'user', content: 'How warm is it?' }], tools: [tool],
};
const textOf = (message) => message.content.filter((block) => block.type === 'text').map((block) => block.text).join('');

report('toolRunner', textOf(await client.beta.messages.toolRunner(body).runUntilDone()));

let last;
for await (const stream of client.beta.messages.toolRunner({ ...body, stream: true })) {
  last = await stream.finalMessage();
}
report('toolRunner, streamed', textOf(last));
