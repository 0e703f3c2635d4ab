// The conversation: what is asked, and answers as they come.

import * as gateway from "./gateway.js";
import { at, element } from "./elements.js";

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
    this.shown = show("assistant", "Model");
    this.shown.root.classList.add("is-going");
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    this.reason = choice.finish_reason || this.reason;
    const delta = choice.delta || {};
    if (delta.reasoning) this.think(delta.reasoning);
    if (delta.content) {
      this.first ??= performance.now();
      this.content += delta.content;
      this.shown.text.append(delta.content);
    }
    const log = at("messages");
    log.scrollTop = log.scrollHeight;
  }

  think(text) {
    this.first ??= performance.now();
    if (!this.thoughts) {
      this.thoughts = element("div", { class: "text" });
      this.shown.text.before(element("details", { open: true }, element("summary", {}, "Thoughts"), this.thoughts));
    }
    this.thoughts.append(text);
  }

  end(reason, look) {
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
    this.shown.root.append(foot);
  }
}

function show(role, who) {
  const text = element("div", { class: "text" });
  const root = element("article", { class: `message ${role}` }, element("div", { class: "who" }, who), text);
  const log = at("messages");
  log.append(root);
  log.scrollTop = log.scrollHeight;
  return { root, text };
}
