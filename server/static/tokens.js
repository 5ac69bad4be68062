// Text that knows its tokens: each tinted by how unlikely it was, with a card that says what else was likely.

const card = document.getElementById("token-card");

export class TokenText {
  #body;
  #text = ""; // of the answer, as far as no token has claimed it
  #group = []; // tokens that make up a character only together
  #groups = []; // whose text has not come yet
  #focused = 0;

  // body: the element that the tokens are appended to.
  constructor(body) {
    this.#body = body;
    body.tabIndex = 0;
    body.setAttribute("aria-description", "Arrow keys go through its tokens");
    body.addEventListener("pointerover", (event) => this.#show(event.target));
    body.addEventListener("pointerout", hideCard);
    body.addEventListener("keydown", (event) => this.#move(event));
    body.addEventListener("focusin", (event) => this.#show(event.target));
    body.addEventListener("focusout", hideCard);
  }

  // Text and tokens do not come in step: a character may take several tokens, and text that may become a stop
  // string comes late.
  append(text, tokens) {
    this.#text += text;
    for (const token of tokens) {
      this.#group.push(token);
      const groupText = decode(this.#group);
      if (groupText === null) continue;
      this.#groups.push({ text: groupText, tokens: this.#group });
      this.#group = [];
    }
    this.#place();
  }

  finish() {
    this.#place();
    if (this.#text) this.#body.append(this.#text);
    this.#text = "";
  }

  #place() {
    while (this.#groups.length) {
      let { text, tokens } = this.#groups[0];
      if (this.#text.startsWith(text.trimStart()) && !this.#body.hasChildNodes()) text = text.trimStart();
      if (text && text.startsWith(this.#text) && text !== this.#text) return; // the rest is still to come
      this.#groups.shift();
      if (!text || !this.#text.startsWith(text)) continue; // an end token, which has no text in the answer
      this.#text = this.#text.slice(text.length);
      this.#body.append(makeSpan(text, tokens));
    }
  }

  #show(target) {
    if (target.tokens) showCard(target);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const spans = this.#body.querySelectorAll(".token");
    if (!step || !spans.length) return;
    event.preventDefault();
    const isInside = event.target !== this.#body;
    this.#focused = isInside ? Math.min(spans.length - 1, Math.max(0, this.#focused + step)) : this.#focused;
    spans[this.#focused].focus();
  }
}

function makeSpan(text, tokens) {
  const span = document.createElement("span");
  span.className = "token";
  span.tabIndex = -1;
  span.dataset.surprise = surprise(Math.min(...tokens.map((token) => token.logprob)));
  span.textContent = text;
  span.tokens = tokens;
  return span;
}

// 0 to 4 (below 1%).
function surprise(logprob) {
  return [0.3, 0.1, 0.03, 0.01].filter((limit) => Math.exp(logprob) < limit).length;
}

// The text of tokens, or null while their bytes are no whole characters.
function decode(tokens) {
  if (tokens.some((token) => !token.bytes)) return tokens.map((token) => token.token).join("");
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(
      new Uint8Array(tokens.flatMap((token) => token.bytes)),
    );
  } catch {
    return null;
  }
}

function showCard(span) {
  card.replaceChildren(...span.tokens.flatMap(describe));
  card.hidden = false;
  const place = span.getClientRects()[0];
  const left = Math.min(place.left, innerWidth - card.offsetWidth - 12);
  const above = place.top - card.offsetHeight - 8;
  card.style.left = `${Math.max(12, left)}px`;
  card.style.top = `${above > 8 ? above : place.bottom + 8}px`;
  span.setAttribute("aria-describedby", "token-card");
}

function hideCard() {
  card.hidden = true;
}

function describe(token) {
  const head = document.createElement("p");
  head.className = "token-head";
  const name = document.createElement("code");
  name.textContent = visible(token.token);
  const figure = document.createElement("span");
  figure.textContent = `${percent(token.logprob)} · log-probability ${token.logprob.toFixed(2)}`;
  head.append(name, figure);
  const list = document.createElement("ol");
  for (const other of token.top_logprobs ?? []) {
    const item = document.createElement("li");
    if (other.token === token.token) item.className = "chosen";
    const text = document.createElement("code");
    text.textContent = visible(other.token);
    const bar = document.createElement("span");
    bar.className = "token-bar";
    bar.style.setProperty("--part", Math.exp(other.logprob));
    const part = document.createElement("span");
    part.textContent = percent(other.logprob);
    item.append(text, bar, part);
    list.append(item);
  }
  return [head, list];
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100%" : value < 0.1 ? "< 0.1%" : `${value.toFixed(1)}%`;
}
