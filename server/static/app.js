// The frame of the page: which view is shown, how the engine is, and the API key.

import { apiKey, call } from "./api.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["playground", "live"];
const STATES = {
  ready: "ready",
  starting: "the engine is starting",
  restarting: "the engine is starting again",
  stopped: "the engine has stopped",
};

const playground = new Playground();
const live = new Live(showEngine);

function showView() {
  const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const view of VIEWS) $(view).hidden = view !== name;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name === "live" ? "Live · jaxllm" : "jaxllm";
  live.isShown = name === "live";
  if (name === "playground") playground.focus();
}

// snapshot: what /live said; error: why it said nothing.
function showEngine(snapshot, error) {
  let state = "unknown", text;
  if (snapshot) {
    const isStuck = snapshot.state === "ready" && snapshot.problem;
    state = isStuck ? "stuck" : snapshot.is_draining ? "draining" : snapshot.state;
    text = isStuck ? "the engine is stuck" : snapshot.state === "ready" ? snapshot.model : STATES[snapshot.state];
    if (snapshot.is_draining) text = "takes no new requests";
    playground.maxModelLen = snapshot.engine.max_model_len;
  } else {
    text = error.status === 401 ? "an API key is needed" : "not reachable";
  }
  $("engine-dot").dataset.state = state;
  if ($("engine-text").textContent !== text) $("engine-text").textContent = text;
}

async function loadModels() {
  try {
    const models = await (await call("v1/models")).json();
    playground.models = models.data.map((model) => model.id);
  } catch (error) {
    if (error.status !== 401) console.warn(`The list of models: ${error.message}`);
  }
}

function askForKey() {
  $("key").value = apiKey.get();
  $("key-dialog").returnValue = "";
  $("key-dialog").showModal();
}

$("key-button").addEventListener("click", askForKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "save") return;
  apiKey.set($("key").value.trim());
  $("key").value = "";
  loadModels();
  live.poll();
});
$("key-form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.target.id !== "key") return;
  event.preventDefault(); // Enter would press the first button, which is Cancel
  $("key-dialog").close("save");
});
playground.onKeyNeeded = askForKey;

addEventListener("hashchange", showView);
showView();
loadModels();
live.start();
