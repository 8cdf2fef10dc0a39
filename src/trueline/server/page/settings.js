// Settings: a form, kept in this browser, and the fields of requests that they make.

import { CANDIDATES } from "./tokens.js";

const KEY = "trueline.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The values of a form's fields by their names, as texts. */
export class Settings {
  constructor(form, storage = localStorage) {
    this.form = form;
    this.storage = storage;
    this.#fill(read(storage));
    this.#checkTools();
    form.addEventListener("input", () => {
      this.#checkTools();
      this.save();
    });
  }

  get(name) {
    const field = this.form.elements[name];
    return field.type === "checkbox" ? field.checked : field.value.trim();
  }

  /** Of a checkbox. */
  check(name) {
    this.form.elements[name].checked = true;
    this.save();
  }

  save() {
    const values = Object.fromEntries(this.#fields().map(({ name }) => [name, this.get(name)]));
    this.storage.setItem(KEY, JSON.stringify(values));
  }

  reset() {
    this.form.reset();
    this.save();
    this.form.dispatchEvent(new Event("input"));
  }

  /** The label of the first field that holds what it cannot, or null. */
  wrong() {
    const field = this.#fields().find((each) => !each.checkValidity());
    return field ? `${field.labels[0].textContent.trim()}: ${field.validationMessage}` : null;
  }

  /** What is empty is left to the server. */
  forRequest() {
    const fields = {};
    for (const name of NUMBERS) {
      if (this.get(name) !== "") fields[name] = Number(this.get(name));
    }
    if (this.get("tools") !== "") fields.tools = JSON.parse(this.get("tools"));
    return this.get("tokens") ? { ...fields, logprobs: true, top_logprobs: CANDIDATES } : fields;
  }

  /** The server says what is wrong with tools; what is no list is told here. */
  #checkTools() {
    const text = this.get("tools");
    this.form.elements.tools.setCustomValidity(text === "" || isList(text) ? "" : "not a list in JSON");
  }

  #fields() {
    return [...this.form.elements].filter((field) => field.name);
  }

  #fill(values) {
    for (const field of this.#fields()) {
      const value = values[field.name];
      if (typeof value === "boolean") field.checked = value;
      else if (typeof value === "string") field.value = value;
    }
  }
}

function isList(text) {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

function read(storage) {
  try {
    return JSON.parse(storage.getItem(KEY) ?? "{}") ?? {};
  } catch {
    return {};
  }
}
