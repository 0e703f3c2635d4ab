// The page: a chat, and the pool beside it.

import * as gateway from "./gateway.js";
import { Chat } from "./chat.js";
import { at, element } from "./elements.js";
import * as pipeline from "./pipeline.js";
import * as timeline from "./timeline.js";

const LOOK_MS = 1000;
const TIMELINE_LOOKS = 20; // its end is written a moment after the last event
const TIMELINE_MS = 250;
let pool = "";

const problem = (message) => {
  at("problem").textContent = message;
  at("problem").hidden = !message;
};

async function showTimeline(id) {
  pool = gateway.poolOf(id);
  try {
    for (let look = 0; look < TIMELINE_LOOKS; look++) {
      const told = await gateway.timeline(id);
      if (look === TIMELINE_LOOKS - 1 || told.requests.every((each) => each.moments.some((moment) => moment.name === "delivered"))) {
        timeline.draw(told);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, TIMELINE_MS));
    }
  } catch (error) {
    timeline.explain(error.message);
  }
}

const chat = new Chat(showTimeline);

async function loadModels() {
  try {
    const found = await gateway.models();
    at("model").replaceChildren(...found.map((model) => element("option", { value: model.id }, model.id)));
    problem(found.length ? "" : "No model is served so far: its workers are still starting.");
    return found.length > 0;
  } catch (error) {
    problem(error.message);
    if (error.status === 401) openKeys();
    return error.status === 401;
  }
}

// Again and again until there is a model, or it is known that a key is needed.
async function waitForModels() {
  while (!(await loadModels())) await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
}

async function look() {
  if (!document.hidden) {
    try {
      pipeline.draw(await gateway.pipeline(pool));
    } catch (error) {
      pipeline.explain(error instanceof gateway.Refusal ? error.message : "The gateway does not answer.");
    }
  }
  setTimeout(look, LOOK_MS);
}

function fields() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  return {
    model: at("model").value,
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_completion_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}

async function ask() {
  const text = at("text").value.trim();
  if (!text || chat.isGoing || !at("ask").reportValidity()) return;
  at("text").value = "";
  problem("");
  going(true);
  try {
    await chat.ask(text, { system: at("system").value.trim(), fields: fields() });
  } catch (error) {
    problem(error instanceof gateway.Refusal ? error.message : "The gateway does not answer. Send the message again.");
    if (!at("text").value) at("text").value = text;
    if (error.status === 401) openKeys();
  } finally {
    going(chat.isGoing);
    at("text").focus();
  }
}

function going(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

function openKeys() {
  if (at("keys").open) return;
  at("api-key").value = gateway.keys.api;
  at("control-token").value = gateway.keys.control;
  at("keys").showModal();
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !at("keys").open) chat.stop(); });
at("stop").addEventListener("click", () => chat.stop());
at("clear").addEventListener("click", () => { chat.clear(); problem(""); at("text").focus(); });
at("keys-open").addEventListener("click", openKeys);
at("keys").addEventListener("close", () => {
  if (at("keys").returnValue !== "save") return;
  gateway.keys.api = at("api-key").value.trim();
  gateway.keys.control = at("control-token").value.trim();
  waitForModels();
});

waitForModels();
look();
at("text").focus();
