// A conversation with the model, over /v1/chat/completions.

import { call, events } from "./api.js";
import { TokenText } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const NUM_ALTERNATIVES = 5;

export class Playground {
  #turns = []; // as the API has them: {role, content}
  #request = null; // AbortController of the answer that is being made
  model = "";
  onKeyNeeded = () => {};

  constructor() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("prompt").addEventListener("input", fitHeight);
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#request && !document.querySelector("dialog[open]")) this.stop();
    });
    $("suggestions").addEventListener("click", (event) => {
      if (event.target.tagName !== "BUTTON") return;
      $("prompt").value = event.target.textContent;
      this.#send();
    });
    $("new-conversation").addEventListener("click", () => this.reset());
    $("fields").addEventListener("submit", (event) => event.preventDefault());
    $("fields").addEventListener("input", showValues);
    $("settings").open = matchMedia("(min-width: 60rem)").matches;
    showValues();
  }

  // Names that the server goes by; there is something to choose only if it has several.
  set models(names) {
    $("model").replaceChildren(...names.map((name) => new Option(name, name)));
    $("model-field").hidden = names.length < 2;
    this.model = names[0] ?? "";
    $("welcome-model").textContent = this.model || "the model";
  }

  // The longest answer that is asked for leaves room for the conversation.
  set maxModelLen(length) {
    if ($("max-tokens").max === String(length)) return;
    $("max-tokens").max = length;
    if (Number($("max-tokens").value) > length / 2) $("max-tokens").value = Math.floor(length / 2);
  }

  focus() {
    $("prompt").focus({ preventScroll: true });
  }

  stop() {
    this.#request?.abort();
  }

  reset() {
    this.stop();
    this.#turns = [];
    $("messages").replaceChildren($("welcome"));
    $("welcome").hidden = false;
    this.focus();
  }

  async #send() {
    const text = $("prompt").value.trim();
    if (!text || this.#request) return;
    $("prompt").value = "";
    fitHeight();
    $("welcome").hidden = true;
    for (const notice of $("messages").querySelectorAll(".failure")) notice.remove();
    const question = addMessage("user", "You");
    question.body.append(text);
    const answer = addMessage("assistant", "Model");
    const turns = this.#turns;
    turns.push({ role: "user", content: text });
    this.#setBusy(new AbortController());
    const written = new Answer(answer);
    try {
      await this.#stream(turns, written);
    } catch (error) {
      if (error.name !== "AbortError") written.failure = error;
    }
    written.finish();
    if (turns === this.#turns) this.#keep(written, text, question, answer);
    this.#setBusy(null);
  }

  async #stream(turns, written) {
    const body = { model: $("model").value || this.model, ...options(), stream: true };
    const system = $("system").value.trim();
    body.messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    body.stream_options = { include_usage: true };
    const response = await call("v1/chat/completions", { body, signal: this.#request.signal });
    for await (const chunk of events(response)) written.take(chunk);
  }

  // What was said stays in the conversation. A question that has no answer is handed back instead.
  #keep(written, text, question, answer) {
    if (written.content || written.reason) {
      this.#turns.push({ role: "assistant", content: written.content });
    } else {
      this.#turns.pop();
      question.element.remove();
      answer.element.remove();
      $("prompt").value = text;
      fitHeight();
    }
    if (written.failure) showFailure(written.failure.message || "the server cannot be reached");
    if (written.failure?.status === 401) this.onKeyNeeded();
    if (!this.#turns.length && !written.failure) $("welcome").hidden = false;
  }

  #setBusy(request) {
    this.#request = request;
    const isBusy = request !== null;
    $("messages").setAttribute("aria-busy", String(isBusy));
    $("send").hidden = isBusy;
    $("stop").hidden = !isBusy;
    if (!isBusy) this.focus();
  }
}

// An answer while it comes in.
class Answer {
  #message;
  #tokens = null;
  #started = performance.now();
  #first = null;
  #usage = null;
  #thinking = null;
  content = "";
  reason = null; // why it ended
  failure = null;

  constructor(message) {
    this.#message = message;
    message.element.classList.add("is-coming");
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const follows = isAtEnd();
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) this.#first ??= performance.now();
    if (reasoning) this.#think(reasoning);
    const tokens = reasoning ? [] : (choice.logprobs?.content ?? []);
    if (tokens.length || this.#tokens) {
      this.#tokens ??= new TokenText(this.#message.body);
      this.#tokens.append(content ?? "", tokens);
    } else if (content) {
      this.#message.body.append(content);
    }
    this.content += content ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    if (follows) scrollToEnd();
  }

  finish() {
    const { element, body } = this.#message;
    element.classList.remove("is-coming");
    this.#tokens?.finish();
    body.normalize();
    const seconds = (performance.now() - this.#started) / 1e3;
    const parts = [];
    const numTokens = this.#usage?.completion_tokens;
    if (numTokens) parts.push(`${numTokens.toLocaleString("en")} ${numTokens === 1 ? "token" : "tokens"}`);
    if (this.#first) parts.push(`first after ${milliseconds((this.#first - this.#started) / 1e3)}`);
    const streamed = seconds - ((this.#first ?? 0) - this.#started) / 1e3;
    if (numTokens > 1 && streamed > 0) parts.push(`${((numTokens - 1) / streamed).toFixed(1)} tokens/s`);
    if (this.reason === "length") parts.push("cut off: it reached the longest length");
    else if (!this.reason) parts.push(this.failure ? "broke off" : "stopped");
    const foot = document.createElement("p");
    foot.className = "foot";
    foot.textContent = parts.join(" · ");
    element.append(foot);
    if (isAtEnd()) scrollToEnd();
  }

  #think(text) {
    if (!this.#thinking) {
      const details = document.createElement("details");
      details.className = "thinking";
      const summary = document.createElement("summary");
      summary.textContent = "Thinking";
      this.#thinking = document.createElement("div");
      details.append(summary, this.#thinking);
      this.#message.body.before(details);
    }
    this.#thinking.append(text);
  }
}

// The sampling settings that differ from the server's own.
function options() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const result = { temperature: number("temperature"), seed: number("seed") };
  result.max_completion_tokens = number("max-tokens");
  if (number("top-p") < 1) result.top_p = number("top-p");
  if (number("min-p") > 0) result.min_p = number("min-p");
  if (number("top-k") > 0) result.top_k = number("top-k");
  if ($("stop-text").value) result.stop = [$("stop-text").value];
  if ($("logprobs").checked) Object.assign(result, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return result;
}

function showValues() {
  for (const output of $("fields").querySelectorAll("output")) {
    const { id, value } = $(output.htmlFor.value);
    const isOff = (id === "top-p" && value === "1") || (id === "min-p" && value === "0");
    output.value = isOff ? "off" : Number(value).toFixed(2);
  }
  $("logprobs-note").hidden = !$("logprobs").checked;
}

function addMessage(role, name) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", name);
  const body = document.createElement("div");
  body.className = "body";
  body.dir = "auto";
  element.append(body);
  $("messages").append(element);
  scrollToEnd();
  return { element, body };
}

function showFailure(message) {
  const notice = document.createElement("p");
  notice.className = "notice failure";
  notice.setAttribute("role", "alert");
  notice.textContent = message;
  $("messages").append(notice);
  scrollToEnd();
}

function milliseconds(seconds) {
  return seconds < 1 ? `${Math.round(1e3 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}

function fitHeight() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function isAtEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 48;
}

function scrollToEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}
