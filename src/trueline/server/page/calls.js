// Calls of tools that the model asks for, and what the user says they found.

import { copyText } from "./clipboard.js";
import { button, element } from "./dom.js";

export class CallView {
  constructor(call) {
    this.call = call;
    this.name = element("span", { class: "name" });
    this.text = element("code");
    this.node = element(
      "figure",
      { class: "code call" },
      element(
        "figcaption", {},
        element("span", {}, "calls ", this.name),
        button("Copy", () => copyText(this.text.textContent)),
      ),
      element("pre", { tabindex: 0 }, this.text),
    );
  }

  update(isBusy) {
    this.name.textContent = this.call.name;
    const shown = isBusy ? this.call.arguments : indented(this.call.arguments);
    if (this.text.textContent !== shown) this.text.textContent = shown;
  }
}

/** A field for each call. */
export class ResultsForm {
  constructor(message, give) {
    const fields = message.calls.map(({ name }) => element("textarea", { rows: 2, "aria-label": `Result of ${name}` }));
    const give_all = (event) => {
      event.preventDefault();
      give(message.calls.map(({ id, name }, i) => ({ role: "tool", id, name, content: fields[i].value })));
    };
    this.node = element(
      "form",
      { class: "results", onsubmit: give_all },
      element("p", {}, "This page runs no tools. Say what they found, and the model goes on."),
      message.calls.map(({ name }, i) => element("label", {}, `Result of ${name}`, fields[i])),
      element("button", { type: "submit" }, message.calls.length > 1 ? "Give results" : "Give result"),
    );
  }
}

/** JSON in lines; what is none stays as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
