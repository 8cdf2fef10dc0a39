// Requests to this server, and its streams.

const KEY = "trueline.key";

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

/** Asks the user for a key: set by the page. Resolves to null where there is none to be had. */
let askForKey = async () => null;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The key is kept as long as this tab is. */
export const apiKey = () => sessionStorage.getItem(KEY);

/** A response with status 200; ApiError otherwise. A key that is missing is asked for. */
export async function request(path, { body = null, signal = null } = {}) {
  for (let again = false; ; again = true) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401) throw error;
    const key = await askForKey(again || apiKey() !== null);
    if (key === null) throw error;
    sessionStorage.setItem(KEY, key);
  }
}

async function send(path, body, signal) {
  const headers = body === null ? {} : { "content-type": "application/json" };
  const key = apiKey();
  if (key !== null) headers.authorization = `Bearer ${key}`;
  try {
    return await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? null : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  const retryAfter = response.headers.get("retry-after");
  const said = { status: response.status, retryAfter };
  try {
    return fromBody(await response.json(), said);
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, said);
  }
}

function fromBody(body, said) {
  const { message, param, code } = body.error;
  return new ApiError(message, { ...said, param, code });
}

/** The chunks of a streamed chat. ApiError where the stream breaks off. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  const events = new EventReader();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await readNext(reader);
    if (done) throw new ApiError("The connection was lost before the end of the answer.");
    for (const data of events.take(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw fromBody(chunk, {});
      yield chunk;
    }
  }
}

async function readNext(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the end of the answer.");
  }
}

/** The data of server-sent events, however the text is cut. */
export class EventReader {
  #rest = "";

  *take(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
