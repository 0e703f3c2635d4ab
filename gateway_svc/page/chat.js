// The conversation: what is asked, and answers as they come.

import * as gateway from "./gateway.js";
import { at, element } from "./elements.js";

const NEAR_PX = 40; // of the end: who reads there sees what comes
let follows = true;

export class Chat {
  constructor(onEnd) {
    this.onEnd = onEnd; // called with a request's id
    this.clear();
  }

  get isGoing() { return Boolean(this.abort); }

  clear() {
    this.stop();
    this.history = [];
    for (const each of at("messages").querySelectorAll(".message")) each.remove();
    at("messages").querySelector(".hint").hidden = false;
  }

  stop() {
    if (!this.abort) return;
    if (this.id) gateway.cancel(this.id).catch(() => undefined);
    this.abort.abort();
  }

  async ask(text, call) {
    const abort = (this.abort = new AbortController());
    this.id = "";
    at("messages").querySelector(".hint").hidden = true;
    const asked = { role: "user", content: text };
    show("user", "You").text.textContent = text;
    const answer = new Answer();
    const messages = [...(call.system ? [{ role: "system", content: call.system }] : []), ...this.history, asked];
    try {
      for await (const chunk of gateway.chat({ ...call.fields, messages }, abort.signal, (id) => { this.id = id; }))
        answer.take(chunk);
      this.history.push(asked, { role: "assistant", content: answer.content });
    } catch (error) {
      if (!abort.signal.aborted) {
        answer.end("failed");
        throw error;
      }
      if (this.abort === abort && answer.content) this.history.push(asked, { role: "assistant", content: answer.content });
      answer.end("stopped");
      return;
    } finally {
      if (this.abort === abort) this.abort = undefined;
    }
    const id = this.id;
    answer.end(answer.reason, () => this.onEnd(id));
    this.onEnd(id);
  }
}

class Answer {
  constructor() {
    this.began = performance.now();
    this.content = "";
    this.reason = "";
    this.waiting = { reasoning: "", content: "" }; // came, and is drawn in the next frame
    this.frame = 0;
    this.shown = show("assistant", "Model");
    this.shown.root.classList.add("is-going");
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    this.reason = choice.finish_reason || this.reason;
    const reasoning = choice.delta?.reasoning || "";
    const content = choice.delta?.content || "";
    if (!reasoning && !content) return;
    this.first ??= performance.now();
    this.content += content;
    this.waiting.reasoning += reasoning;
    this.waiting.content += content;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  // What came since the last frame: a page that is laid out for each token falls behind the stream.
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { reasoning, content } = this.waiting;
    this.waiting = { reasoning: "", content: "" };
    scrolled(() => {
      if (reasoning) append((this.thoughts ??= this.think()), reasoning);
      if (content) append(this.shown.text, content);
    });
  }

  think() {
    const thoughts = element("div", { class: "text" });
    this.shown.text.before(element("details", { open: true }, element("summary", {}, "Thoughts"), thoughts));
    return thoughts;
  }

  end(reason, look) {
    this.draw();
    this.shown.root.classList.remove("is-going");
    const foot = element("footer", {}, element("span", {}, reason || "ended"));
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
    if (this.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage;
      foot.append(element("span", {}, `${prompt} + ${tokens} tokens`));
      if (this.first && tokens > 1) {
        foot.append(element("span", {}, `first after ${(this.first - this.began).toFixed(0)} ms`),
          element("span", {}, `${((tokens - 1) / seconds).toFixed(0)} tokens/s`));
      }
    }
    if (look) {
      const button = element("button", { type: "button" }, "Timeline");
      button.addEventListener("click", look);
      foot.append(button);
    }
    scrolled(() => this.shown.root.append(foot));
  }
}

// Each line of a text is an element of its own: the last one alone is laid out again when it grows.
function append(text, more) {
  const [rest, ...lines] = more.split("\n");
  if (!text.lastChild) text.append(element("div"));
  text.lastChild.append(rest);
  text.lastChild.normalize();
  text.append(...lines.map((line) => element("div", {}, line)));
}

// Shows the end of the messages as they grow, unless the reader has scrolled up from it.
function scrolled(add) {
  add();
  showEnd();
}

function showEnd() {
  if (follows) at("messages").scrollTop = at("messages").scrollHeight;
}

// Where they have become higher or lower since, it was not the reader who left the end.
let height = at("messages").clientHeight;

at("messages").addEventListener("scroll", ({ target: log }) => {
  if (log.clientHeight === height) follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
});

new ResizeObserver(([{ target: log }]) => {
  height = log.clientHeight;
  showEnd();
}).observe(at("messages"));

function show(role, who) {
  const text = element("div", { class: "text" });
  const root = element("article", { class: `message ${role}` }, element("div", { class: "who" }, who), text);
  follows = true;
  scrolled(() => at("messages").append(root));
  return { root, text };
}
