// The official client of Node.
import OpenAI from "openai";
import assert from "node:assert/strict";

const asked = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: asked.url, apiKey: "none", maxRetries: 0 });
const user = { role: "user", content: "hi" };
const always = { model: asked.model, temperature: 0, messages: [user] };
// of what a grammar holds: the likeliest token of a random model may be white space for ever
const formed = { ...always, temperature: 1, seed: 1 };
const thinking = { chat_template_kwargs: { enable_thinking: true }, thinking_token_budget: 8 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", strict: true, parameters } };

function checkTrip({ city, days }) {
  assert(["Rome", "Oslo"].includes(city));
  assert(Number.isInteger(days) && days >= 1 && days <= 9);
}

const cases = {
  async chat() {
    const answer = await client.chat.completions.create({ ...always, max_tokens: 12 });
    assert.equal(answer.choices[0].message.content, asked.text);
  },
  async stream() {
    let text = "";
    const chunks = await client.chat.completions.create({ ...always, max_tokens: 12, stream: true });
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, asked.text);
  },
  async structured() {
    const form = { type: "json_schema", json_schema: { name: "trip", strict: true, schema: parameters } };
    const answer = await client.chat.completions.parse({ ...formed, response_format: form });
    checkTrip(answer.choices[0].message.parsed);
  },
  async reasoning() {
    const answer = await client.chat.completions.create({ ...always, max_tokens: 24, ...thinking });
    assert.equal(answer.choices[0].message.reasoning_content, asked.reasoning);
    assert.equal(answer.choices[0].message.content, asked.after);
  },
  async tools() {
    const offered = { tools: [tool], tool_choice: "required" };
    const first = await client.chat.completions.create({ ...formed, ...offered });
    const message = first.choices[0].message;
    const results = message.tool_calls.map((call) => {
      assert.equal(call.function.name, "get_weather");
      checkTrip(JSON.parse(call.function.arguments));
      return { role: "tool", tool_call_id: call.id, content: "rain" };
    });
    const messages = [user, message, ...results];
    const then = await client.chat.completions.create(
      { ...formed, messages, tools: [tool], tool_choice: "none", max_tokens: 12 });
    assert(then.usage.prompt_tokens > first.usage.prompt_tokens);
    assert(then.choices[0].message.content);
  },
  async "streamed tools"() {
    const offered = { tools: [tool], tool_choice: { type: "function", function: { name: "get_weather" } } };
    const whole = await client.chat.completions.create({ ...formed, ...offered });
    const stream = client.chat.completions.stream({ ...formed, ...offered });
    const message = (await stream.finalChatCompletion()).choices[0].message;
    const plain = (each) => each.tool_calls.map((call) => [call.function.name, call.function.arguments]);
    assert.deepEqual(plain(message), plain(whole.choices[0].message));
    message.tool_calls.forEach((call) => checkTrip(JSON.parse(call.function.arguments)));
  },
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    outcomes[name] = null;
  } catch (error) {
    outcomes[name] = error.stack;
  }
}
console.log("OUTCOMES " + JSON.stringify(outcomes));
