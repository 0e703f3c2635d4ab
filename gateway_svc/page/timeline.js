// One request's way through the hops.

import { at, drawn, element } from "./elements.js";

// The stretches between moments, in order: name, the moment that begins it, the moment that ends it.
export function spans(request) {
  const first = (name) => request.moments.find((moment) => moment.name === name);
  const starts = request.moments.filter((moment) => moment.name === "started");
  const time = (moment) => moment && moment.ms;
  const firstToken = starts.find((start) => start.first_token_ms !== null)?.first_token_ms;
  const found = [
    ["submit", time(first("accepted")), time(first("tokenizing")), "gateway: checked and submitted"],
    ["tokenize", time(first("tokenizing")), time(first("tokenized")), "tokenizer: text became tokens"],
    ["queue", time(first("tokenized")), time(starts[0]), "scheduler: until it had a place in a batch"],
    ["prefill", time(starts[0]), firstToken, `${starts[0]?.worker}: its prompt was computed`],
    ["decode", firstToken, time(first("last_token")), `${starts.at(-1)?.worker}: its output was computed`],
    ["detokenize", time(first("last_token")), time(first("result")), "detokenizer: tokens became text, and its end"],
    ["deliver", time(first("result")), time(first("delivered")), "gateway: the client has all of it"],
  ];
  const restarts = starts.slice(1).map((start) =>
    [`started again (${start.reason.replace("_", " ")})`, start.ms, start.first_token_ms ?? start.ms, `${start.worker} at token ${start.num_tokens}`]);
  return [...found, ...restarts].filter(([, begin, end]) => begin !== undefined && end !== undefined && end !== null);
}

export function draw(told) {
  const request = told.requests[0];
  const stretches = spans(request);
  const end = Math.max(...stretches.map(([, , until]) => until), 1);
  const least = 0.6; // of a bar, percent
  const rows = stretches.flatMap(([name, begin, until, meaning]) => [
    element("span", { title: meaning, "data-span": name }, name),
    drawn("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: from ${begin.toFixed(1)} to ${until.toFixed(1)} ms. ${meaning}` },
      drawn("rect", { class: "track", x: 0, y: 0, width: 100, height: 4 }),
      drawn("rect", { class: "span", x: Math.min((100 * begin) / end, 100 - least), y: 0, height: 4, width: Math.max(least, (100 * (until - begin)) / end) })),
    element("span", { class: "ms" }, `${(until - begin).toFixed(1)} ms`),
  ]);
  at("timeline").replaceChildren(element("div", { class: "spans" }, ...rows),
    element("p", { class: "hint" }, `${request.request_id}, ${end.toFixed(1)} ms`));
}

export const explain = (message) => at("timeline").replaceChildren(element("p", { class: "hint" }, message));
