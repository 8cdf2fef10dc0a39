// One answer: what has come of it, and how fast.

import { tokensOf } from "./tokens.js";

/** Adds the chunks of a stream to a message. */
export class Answer {
  #reasonedFrom = null;

  constructor(message, now = () => performance.now()) {
    this.message = message;
    this.now = now;
    this.began = now();
    this.first = this.last = null;
    this.firstTokens = 0;
    message.stats = { tokens: 0, seconds: 0 };
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    const message = this.message;
    if (chunk.usage) this.#count(chunk.usage);
    if (!choice) return;
    const { content, reasoning, reasoning_content, tool_calls, malformed_tool_calls } = choice.delta ?? {};
    this.#reason(reasoning_content ?? reasoning ?? "");
    message.content += content ?? "";
    for (const call of tool_calls ?? []) this.#call(call);
    const tokens = tokensOf(choice.logprobs);
    if (tokens.length) (message.tokens ??= []).push(...tokens);
    for (const { index } of malformed_tool_calls ?? []) this.#drop(index);
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }

  #reason(text) {
    if (!text) return;
    this.#reasonedFrom ??= this.now();
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.message.stats.reasoned = (this.now() - this.#reasonedFrom) / 1000;
  }

  /** A part of a call, which says of which. */
  #call({ index, id, function: { name, arguments: text } = {} }) {
    const calls = (this.message.calls ??= []);
    let call = calls.find((each) => each.index === index);
    if (!call) calls.push(call = { index, id: "", name: "", arguments: "" });
    call.id += id ?? "";
    call.name += name ?? "";
    call.arguments += text ?? "";
  }

  /** A call that cannot be made: what there was of it is text. */
  #drop(index) {
    const calls = this.message.calls?.filter((call) => call.index !== index) ?? [];
    if (calls.length) this.message.calls = calls;
    else delete this.message.calls;
  }

  #count({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
    const stats = this.message.stats;
    stats.prompt = prompt_tokens;
    stats.cached = prompt_tokens_details?.cached_tokens ?? 0;
    if (completion_tokens === stats.tokens) return;
    this.last = this.now();
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = completion_tokens;
      stats.first = (this.first - this.began) / 1000;
    }
    stats.tokens = completion_tokens;
    stats.seconds = (this.last - this.began) / 1000;
    const later = completion_tokens - this.firstTokens;
    // of the tokens after the first: the time to that one is told apart
    stats.rate = later > 0 ? (later * 1000) / (this.last - this.first) : null;
  }
}

/** "128 tokens · 41.3 tokens/s · first after 0.21 s", as far as it is known. */
export function statsLine({ stats, finish }) {
  const parts = [];
  if (stats?.tokens) {
    parts.push(stats.tokens === 1 ? "1 token" : `${stats.tokens} tokens`);
    if (stats.rate) parts.push(`${shownRate(stats.rate)} tokens/s`);
    parts.push(`first after ${stats.first.toFixed(2)} s`);
    const cached = stats.cached ? ` (${stats.cached} cached)` : "";
    parts.push(`prompt ${stats.prompt}${cached}`);
  }
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}

export const shownRate = (rate) => rate.toFixed(rate < 100 ? 1 : 0);

const ENDS = { length: "cut: length", stopped: "stopped", tool_calls: "calls a tool" };
