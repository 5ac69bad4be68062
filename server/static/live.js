// The engine as it works, from /live once a second.

import { call } from "./api.js";
import { TimeChart } from "./chart.js";

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000;
const RATE_POLLS = 6; // the figure of tokens per second is of the last five seconds
const count = (value) => compact(value);
const STATES = [
  { key: "decoding", label: "decoding", color: 1 },
  { key: "prefilling", label: "prefilling", color: 2 },
  { key: "waiting", label: "waiting", color: 3 },
  { key: "preempted", label: "preempted", color: 4, isRare: true },
  { key: "waiting_for_pages", label: "waiting for pages from the host", color: 5, isRare: true },
  { key: "waiting_for_input", label: "waiting for input", color: 6, isRare: true },
];
const QUANTILES = [
  { key: "p50", label: "median", color: 1 },
  { key: "p90", label: "90%", color: 2 },
  { key: "p99", label: "99%", color: 4 },
];

export class Live {
  isShown = false;
  #onSnapshot;
  #polls = []; // {now, snapshot} of the last seconds, the newest last
  #charts = {
    requests: new TimeChart({ title: "Requests by state", series: STATES, isStacked: true, format: count, minTop: 4 }),
    tokens: new TimeChart({
      title: "Generated tokens per second",
      series: [{ key: "generated", label: "generated", color: 1 }],
      isStacked: true,
      format: count,
      minTop: 10,
    }),
    pages: new TimeChart({
      title: "Pages of the KV cache",
      series: [
        { key: "used", label: "in use", color: 1 },
        { key: "cached", label: "kept for their content", color: 3 },
      ],
      isStacked: true,
      format: count,
      minTop: 10,
    }),
    batch: new TimeChart({
      title: "Tokens in a step",
      series: [
        { key: "decode", label: "decode", color: 1 },
        { key: "prefill", label: "prefill", color: 2 },
        { key: "draft", label: "drafted", color: 5, isRare: true },
        { key: "padding", label: "padding", color: 6 },
      ],
      isStacked: true,
      format: count,
      minTop: 8,
    }),
    ttft: new TimeChart({
      title: "Time to the first token",
      note: "TTFT of the last minute",
      series: QUANTILES,
      format: time,
      minTop: 10,
    }),
    itl: new TimeChart({
      title: "Time between tokens",
      note: "ITL of the last minute",
      series: QUANTILES,
      format: time,
      minTop: 10,
    }),
    prompts: new TimeChart({
      title: "Prompt tokens per second",
      series: [
        { key: "computed", label: "computed", color: 2 },
        { key: "found", label: "found in the cache", color: 3 },
      ],
      isStacked: true,
      format: count,
      minTop: 10,
    }),
    step: new TimeChart({
      title: "Time of a step",
      series: [
        { key: "wait", label: "waiting for the device", color: 1 },
        { key: "host", label: "on the host", color: 2 },
      ],
      isStacked: true,
      format: time,
      minTop: 1,
    }),
  };

  #hostPages = new TimeChart({
    title: "Pages in the host's memory",
    series: [
      { key: "cached", label: "kept there", color: 5 },
      { key: "saved", label: "saved a second", color: 1 },
      { key: "loaded", label: "brought back a second", color: 2 },
    ],
    format: count,
    minTop: 10,
  });

  // onSnapshot: called with what /live said, or null and the error.
  constructor(onSnapshot) {
    this.#onSnapshot = onSnapshot;
    $("charts").append(...Object.values(this.#charts).map((chart) => chart.element));
  }

  start() {
    const next = async () => {
      if (!document.hidden) await this.poll();
      setTimeout(next, PERIOD_MS);
    };
    next();
  }

  async poll() {
    let snapshot;
    try {
      snapshot = await (await call("live", { signal: AbortSignal.timeout(5000) })).json();
    } catch (error) {
      this.#notify(error.status ? error.message : "The server cannot be reached. Trying again…");
      this.#onSnapshot(null, error);
      return;
    }
    const now = performance.now() / 1e3;
    this.#notify(snapshot.problem ? `Requests are not served now: ${snapshot.problem}.` : "");
    this.#onSnapshot(snapshot);
    if (snapshot.steps) this.#take(now, snapshot);
  }

  #take(now, snapshot) {
    const before = this.#polls.at(-1);
    if (before?.snapshot.steps.count > snapshot.steps.count) this.#polls = []; // the engine was started again
    this.#polls = [...this.#polls.slice(1 - RATE_POLLS), { now, snapshot }];
    const { requests, pages, recent } = snapshot;
    const { used, cached, total } = pages.device;
    showList($("figures"), {
      Running: count(snapshot.num_running),
      Waiting: count(snapshot.num_waiting),
      "Tokens per second": compact(rate(this.#polls[0], this.#polls.at(-1))),
      "KV cache in use": `${(100 * snapshot.kv_cache_usage).toFixed(used && snapshot.kv_cache_usage < 0.1 ? 1 : 0)}%`,
    });
    this.#charts.requests.push(now, requests);
    this.#charts.pages.push(now, { used, cached });
    this.#charts.ttft.push(now, recent.ttft_ms);
    this.#charts.itl.push(now, recent.itl_ms);
    if (this.#polls.length > 1) this.#pushRates(before, { now, snapshot });
    showList($("facts"), facts(snapshot, total));
  }

  // There is a chart of the host's pages as soon as there are any.
  #pushHostPages(now, seconds, was, is, cached) {
    const { element } = this.#hostPages;
    if (!element.isConnected && (cached || is.saved)) this.#charts.pages.element.after(element);
    const [saved, loaded] = ["saved", "loaded"].map((key) => (is[key] - was[key]) / seconds);
    this.#hostPages.push(now, { cached, saved, loaded });
  }

  // What happened between two polls.
  #pushRates(before, { now, snapshot }) {
    const was = before.snapshot.steps, is = snapshot.steps;
    const numSteps = is.count - was.count;
    const perStep = (key) => (numSteps ? (is[key] - was[key]) / numSteps : 0);
    const seconds = now - before.now;
    this.#charts.tokens.push(now, { generated: rate(before, { now, snapshot }) });
    const numFound = snapshot.prefix_cache.hit_tokens - before.snapshot.prefix_cache.hit_tokens;
    this.#charts.prompts.push(now, {
      computed: (is.prefill_tokens - was.prefill_tokens) / seconds,
      found: numFound / seconds,
    });
    this.#charts.batch.push(now, {
      decode: perStep("decode_tokens"),
      prefill: perStep("prefill_tokens"),
      draft: perStep("draft_tokens"),
      padding: perStep("padding_tokens"),
    });
    this.#pushHostPages(now, seconds, before.snapshot.page_moves, snapshot.page_moves, snapshot.pages.host.cached);
    this.#charts.step.push(now, { wait: 1e3 * perStep("device_wait_s"), host: 1e3 * perStep("host_s") });
  }

  #notify(message) {
    if ($("live-notice").textContent !== message) $("live-notice").textContent = message;
    $("live-notice").hidden = !message;
  }
}

// Generated tokens per second.
function rate(before, after) {
  const numTokens = after.snapshot.steps.output_tokens - before.snapshot.steps.output_tokens;
  return after.now > before.now ? numTokens / (after.now - before.now) : 0;
}

function facts(snapshot, numPages) {
  const { engine, finished, prefix_cache: prefix, page_moves: moves, steps } = snapshot;
  const tpot = snapshot.recent.tpot_ms;
  const hitRate = prefix.query_tokens ? `${((100 * prefix.hit_tokens) / prefix.query_tokens).toFixed(0)}%` : "–";
  const ended = Object.entries(finished).filter(([, number]) => number);
  return {
    Model: snapshot.model,
    Device: engine.device === engine.platform ? engine.device : `${engine.device} (${engine.platform})`,
    Precision: engine.dtype,
    "Precision of the cache": engine.kv_cache_dtype,
    Context: `${engine.max_model_len.toLocaleString("en")} tokens`,
    Rows: `${engine.max_num_seqs.toLocaleString("en")} at most`,
    "Step budget": `${engine.max_num_batched_tokens.toLocaleString("en")} tokens`,
    Pages: `${numPages.toLocaleString("en")} of ${engine.page_size} tokens`,
    "TPOT of requests, last minute": [tpot.p50, tpot.p90, tpot.p99].map(time).join(" / "),
    "Found in the prefix cache": hitRate,
    Ended: ended.map(([reason, number]) => `${number.toLocaleString("en")} ${reason}`).join(", ") || "none",
    Preemptions: snapshot.num_preemptions.toLocaleString("en"),
    "Waits for pages": `${moves.stalls.toLocaleString("en")}, ${time(1e3 * moves.stall_s)} in all`,
    Steps: steps.count.toLocaleString("en"),
    "Compilations in service": steps.compilations_after_start.toLocaleString("en"),
  };
}

// Terms and values; elements that are there already are kept, so that a selection survives.
function showList(list, values) {
  for (const [term, value] of Object.entries(values)) {
    let entry = [...list.children].find((child) => child.firstChild.textContent === term);
    if (!entry) {
      entry = document.createElement("div");
      entry.append(
        Object.assign(document.createElement("dt"), { textContent: term }),
        Object.assign(document.createElement("dd"), { textContent: "" }),
      );
      list.append(entry);
    }
    if (entry.lastChild.textContent !== value) entry.lastChild.textContent = value;
  }
}

function compact(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  return Number.isInteger(value) || value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function time(milliseconds) {
  if (milliseconds === null) return "–";
  if (!milliseconds) return "0";
  if (milliseconds >= 1e3) return `${(milliseconds / 1e3).toFixed(milliseconds < 1e4 ? 1 : 0)} s`;
  return `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
}
