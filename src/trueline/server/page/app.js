// The page: what its controls do.

import { Answer } from "./answer.js";
import { ApiError, onKeyNeeded, streamChat } from "./api.js";
import { copyText } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { MessageView } from "./message.js";
import { say } from "./notices.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

const conversation = new Conversation();
const settings = new Settings(byId("settings-form"));
const status = new Status();
const views = new Map();
const prompt = byId("prompt");
const scroller = byId("scroll");
/** Stops the answer that is being made; null where there is none. */
let running = null;

// -- the conversation ------------------------------------------------------------------

function show(message) {
  const view = new MessageView(message, { copy, edit, retry, giveResults, recordTokens });
  views.set(message, view);
  byId("messages").append(view.node);
  return view;
}

function showAll() {
  views.clear();
  byId("messages").replaceChildren();
  conversation.messages.forEach(show);
  showWhole();
}

/** Shows what depends on the messages together. */
function showWhole() {
  const { messages } = conversation;
  byId("empty").hidden = messages.length > 0;
  views.forEach((view, message) => view.askForResults(message === messages.at(-1)));
}

function send() {
  const content = prompt.value;
  if (running || !content.trim()) return;
  prompt.value = "";
  fitPrompt();
  show(conversation.add({ role: "user", content }));
  answer();
}

/** Asks for an answer to all that was said. */
async function answer() {
  const messages = conversation.forRequest(settings.get("system"));
  const message = conversation.add({ role: "assistant", content: "" });
  const view = show(message);
  const own = new AbortController();
  setRunning(own);
  view.busy = true;
  showWhole();
  scrollDown(true);
  const answer = new Answer(message);
  const redraw = framewise(() => { view.update(); scrollDown(); });
  try {
    const wrong = settings.wrong();
    if (wrong) throw new ApiError(`Settings, ${wrong}`);
    for await (const chunk of streamChat(request(messages), own.signal)) {
      answer.take(chunk);
      redraw();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = explained(error);
  }
  view.busy = false;
  if (running === own) setRunning(null); // else another answer has begun meanwhile
  showWhole();
  scrollDown();
  announce(message);
  conversation.save();
}

function request(messages) {
  return {
    model: status.model(),
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...settings.forRequest(),
  };
}

function explained(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return `The page failed: ${error.message}`;
  }
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return `${error.status ? `${error.status}: ` : ""}${error.message}${wait}`;
}

function stop() {
  running?.abort();
}

function retry(message) {
  stop();
  conversation.cutAt(message);
  showAll();
  answer();
}

function edit(message) {
  if (running) return;
  conversation.cutAt(message);
  conversation.save();
  showAll();
  prompt.value = message.content;
  fitPrompt();
  prompt.focus();
}

function giveResults(results) {
  if (running) return;
  results.forEach((result) => show(conversation.add(result)));
  answer();
}

function copy(message) {
  copyText(message.content);
}

/** Of an answer that was made without. */
function recordTokens() {
  settings.check("tokens");
  say("Tokens are kept with answers from now on. Retry makes this one again.", { shown: true });
}

function clear() {
  stop();
  conversation.clear();
  showAll();
  prompt.focus();
}

// -- the page --------------------------------------------------------------------------

function setRunning(controller) {
  running = controller;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function announce({ error, finish }) {
  say(error ? "No answer: an error" : finish === "stopped" ? "Stopped" : "Answer complete");
}

/**
 * Calls it once before a frame, however often it is asked to. What takes long is called less often:
 * at least three quarters of the time are left to the reader.
 */
function framewise(draw) {
  let asked = false;
  let rest = 0;
  const run = () => {
    asked = false;
    const began = performance.now();
    draw();
    rest = 3 * (performance.now() - began);
  };
  return () => {
    if (asked) return;
    asked = true;
    setTimeout(() => requestAnimationFrame(run), rest > 16 ? rest : 0);
  };
}

let atEnd = true;
scroller.addEventListener("scroll", () => {
  atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
});

/** Follows the end, unless the reader has gone elsewhere. */
function scrollDown(always = false) {
  if (always || atEnd) scroller.scrollTop = scroller.scrollHeight;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function askKey(wasWrong) {
  const dialog = byId("key");
  const form = byId("key-form");
  byId("key-text").textContent = wasWrong
    ? "This server does not know that key." : "This server needs an API key.";
  form.reset();
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    resolve(dialog.returnValue === "ok" ? form.elements.key.value.trim() : null);
  }, { once: true }));
}

function applyTheme() {
  document.documentElement.dataset.theme = settings.get("theme");
}

prompt.addEventListener("keydown", (event) => {
  const composing = event.isComposing || event.keyCode === 229; // Enter ends a word of an IME
  const isPhone = matchMedia("(pointer: coarse)").matches; // has no Shift+Enter
  if (event.key === "Enter" && !event.shiftKey && !composing && !isPhone) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && prompt.value === "") {
    const last = conversation.messages.findLast(({ role }) => role === "user");
    if (last) edit(last);
  }
});
prompt.addEventListener("input", fitPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", stop);
byId("clear").addEventListener("click", clear);
byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("reset-settings").addEventListener("click", () => settings.reset());
byId("settings-form").addEventListener("input", applyTheme);
window.addEventListener("pagehide", () => conversation.save());

onKeyNeeded(askKey);
applyTheme();
showAll();
scrollDown(true);
status.start();
