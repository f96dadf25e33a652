// LangChain: `createAgent` over `chat` completions and over `responses`, and LangGraph's prebuilt agent (`react`); streamed token by token.

import { createReactAgent } from '@langchain/langgraph/prebuilt';
import { ChatOpenAI } from '@langchain/openai';
import { createAgent, tool } from 'langchain';
import { calculator, description, instructions, name, run, schema } from './driver.mjs';

const tools = [tool(calculator, { name, description, schema })];
const given = (useResponsesApi) => ({ model: new ChatOpenAI({ model: 'gpt-4o', useResponsesApi }), tools, systemPrompt: instructions });

async function answer(agent, question, streamed) {
  const asked = { messages: [{ role: 'user', content: question }] };
  if (!streamed) return (await agent.invoke(asked)).messages.at(-1).text;
  let state;
  for await (const [kind, part] of await agent.stream(asked, { streamMode: ['messages', 'values'] })) if (kind === 'values') state = part;
  return state.messages.at(-1).text;
}

await run({
  chat: (question, streamed) => answer(createAgent(given(false)), question, streamed),
  responses: (question, streamed) => answer(createAgent(given(true)), question, streamed),
  react: (question, streamed) => answer(createReactAgent({ llm: given(false).model, tools, prompt: instructions }), question, streamed),
});
