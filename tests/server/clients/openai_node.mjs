// OpenAI's client for Node: its tool loop by chat completions, whole and streamed, and one by responses.

import OpenAI from 'openai';
import { asked, report, schema } from './outcome.mjs';

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 });
const question = { role: 'user', content: 'How warm is it?' };
const tools = [{
  type: 'function',
  function: { name: 'asked', parameters: schema, parse: JSON.parse, function: asked, description: 'Tells.' },
}];

for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: 'stub', messages: [question], tools, stream });
  report(`runTools${stream ? ', streamed' : ''}`, await runner.finalContent());
}

async function respond(streamed) {
  const input = [question];
  const declared = [{ type: 'function', name: 'asked', parameters: schema, strict: true }];
  for (;;) {
    const body = { model: 'stub', input, tools: declared };
    const response = streamed
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
    const calls = response.output.filter((item) => item.type === 'function_call');
    if (calls.length === 0) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      const output = asked(JSON.parse(call.arguments));
      input.push({ type: 'function_call_output', call_id: call.call_id, output });
    }
  }
}

report('responses', await respond(false));
report('responses, streamed', await respond(true));
