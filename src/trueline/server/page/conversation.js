// What has been said, kept in this browser.

const KEY = "trueline.conversation";
const ROLES = ["user", "assistant", "tool"];

/**
 * Messages in their order, {role, content}: of an assistant with reasoning, calls, finish, stats, tokens
 * and error, as far as there are; of a tool with the id and the name of its call.
 */
export class Conversation {
  constructor(storage = localStorage) {
    this.storage = storage;
    this.messages = read(storage);
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  /** Forgets a message and all after it. */
  cutAt(message) {
    const index = this.messages.indexOf(message);
    if (index >= 0) this.messages.length = index;
  }

  clear() {
    this.messages.length = 0;
    this.save();
  }

  /** Logprobs are large: where there is no room for them, all else is kept. */
  save() {
    const light = () => this.messages.map(({ tokens, ...message }) => message);
    for (const kept of [() => this.messages, light]) {
      try {
        this.storage.setItem(KEY, JSON.stringify(kept()));
        return true;
      } catch {
        // the quota is full
      }
    }
    return false;
  }

  /** As the API takes them. */
  forRequest(system) {
    const kept = this.messages.filter((message) => !isEmpty(message));
    const asked = kept.findLastIndex(({ role }) => role === "user");
    const said = kept.map((message, i) => asSent(message, {
      isAnswered: kept[i + 1]?.role === "tool",
      isCurrent: i > asked,
    }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}

function isEmpty({ role, content, calls }) {
  return role === "assistant" && !content && !calls?.length;
}

/**
 * Calls are sent with their results, and not without. What was thought matters while tools are called
 * for one question, and is not sent again after it.
 */
function asSent({ role, content, reasoning, calls, id, name }, { isAnswered, isCurrent }) {
  if (role === "tool") return { role, tool_call_id: id, name, content };
  const sent = { role, content };
  if (isCurrent && reasoning) sent.reasoning_content = reasoning;
  if (calls && isAnswered) {
    sent.tool_calls = calls.map((call) => (
      { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  }
  return sent;
}

function read(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY) ?? "[]");
    return found.filter(({ role, content }) => ROLES.includes(role) && typeof content === "string");
  } catch {
    return [];
  }
}
