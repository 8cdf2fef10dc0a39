// The model's and the engine's state: /health, /v1/models and /metrics.

import { request } from "./api.js";
import { byId, element } from "./dom.js";

const EVERY = 2000;

export class Status {
  models = [];
  #generated = null;

  start() {
    this.#watch();
    document.addEventListener("visibilitychange", () => this.#watch());
  }

  /** Asks while somebody can see it. */
  async #watch() {
    if (this.watching) return;
    this.watching = true;
    while (!document.hidden) {
      await this.update();
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
    this.watching = false;
  }

  async update() {
    const health = await readHealth();
    show(health);
    if (health.status === "ready" && !this.models.length) await this.#readModels();
    if (health.status !== "unreachable") this.#showMetrics(await readMetrics());
  }

  model() {
    return byId("model").value || null;
  }

  async #readModels() {
    try {
      this.models = (await (await request("v1/models")).json()).data;
    } catch {
      return; // asked again with the next look
    }
    const select = byId("model");
    select.replaceChildren(...this.models.map(({ id }) => element("option", { value: id }, id)));
    select.classList.toggle("single", this.models.length < 2);
    const [{ max_model_len }] = this.models;
    byId("context").textContent = `${max_model_len.toLocaleString("en")} tokens`;
  }

  #showMetrics(metrics) {
    const now = performance.now();
    const generated = metrics.generation_tokens_total;
    const before = this.#generated;
    this.#generated = { generated, now };
    const rate = before && (1000 * (generated - before.generated)) / (now - before.now);
    const percent = (value) => `${Math.round(100 * value)} %`;
    const shown = {
      running: metrics.num_requests_running,
      waiting: metrics.num_requests_waiting,
      cache: metrics.kv_cache_usage_perc === undefined
        ? undefined : percent(metrics.kv_cache_usage_perc),
      rate: Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : undefined,
    };
    for (const [name, value] of Object.entries(shown)) {
      byId(`engine-${name}`).textContent = value ?? "–";
    }
  }
}

async function readHealth() {
  try {
    return await (await fetch("health")).json(); // 503 too says why
  } catch {
    return { status: "unreachable", reason: "the server does not answer" };
  }
}

function show({ status, reason }) {
  const line = byId("health");
  const text = reason ? `${status}: ${reason}` : status;
  if (line.textContent !== text) line.textContent = text;
  line.dataset.status = status;
}

async function readMetrics() {
  try {
    return parseMetrics(await (await fetch("metrics")).text());
  } catch {
    return {};
  }
}

/** Values by name without the prefix: shares are means over engines, all else is summed. */
export function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const sample = /^\w+:(\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (sample) (found[sample[1]] ??= []).push(Number(sample[2]));
  }
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  return Object.fromEntries(Object.entries(found).map(([name, values]) =>
    [name, name.endsWith("_perc") ? sum(values) / values.length : sum(values)]));
}
