// What has been said, kept in this browser.

const KEY = "trueline.conversation";

/** Messages in their order: {role: "user" | "assistant" | "tool", content, …}. */
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
    const said = this.messages.filter((message) => !isEmpty(message)).map(asSent);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}

function isEmpty({ role, content, calls }) {
  return role === "assistant" && !content && !calls?.length;
}

function asSent({ role, content }) {
  return { role, content };
}

function read(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}
