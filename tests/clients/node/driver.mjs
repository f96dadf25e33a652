// Runs an agent as often as it is asked to: each line of standard input is a JSON object with `mode` and `question`, each line of standard output
// one with `answer`, or with `error` where the agent raised. What the agent prints itself goes to standard error.

import { createInterface } from 'node:readline';

export const instructions = 'You calculate.';
export const name = 'calculator';
export const description = 'Calculates a product such as 2*3.';
export const schema = {
  type: 'object',
  properties: { expression: { type: 'string' } },
  required: ['expression'],
  additionalProperties: false,
};

export function calculator({ expression }) {
  const [left, right] = expression.split('*');
  return String(Number(left) * Number(right));
}

// Serves agents by mode, each unstreamed under its name and streamed under `NAME_stream`, until standard input ends.
export async function run(agents) {
  for (const method of ['log', 'info', 'debug']) console[method] = console.error;
  for await (const line of createInterface({ input: process.stdin })) {
    const { mode, question } = JSON.parse(line);
    const streamed = mode.endsWith('_stream');
    let said;
    try {
      said = { answer: await agents[streamed ? mode.slice(0, -'_stream'.length) : mode](question, streamed) };
    } catch (error) {
      console.error(error);
      said = { error: error.constructor.name };
    }
    process.stdout.write(JSON.stringify(said) + '\n');
  }
}
