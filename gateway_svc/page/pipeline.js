// The pool drawn: figures, services and the hops between them, KV blocks.

import { at, drawn, element } from "./elements.js";

const PLACES = {
  gateway: [62, 110], tokenizer: [190, 30], scheduler: [400, 30], worker: [536, 110], detokenizer: [235, 190],
};
const WAYS = {
  prompts: { path: "M62,92 Q72,40 138,32", tip: [138, 32, -8], label: [52, 46] },
  requests: { path: "M242,30 L348,30", tip: [348, 30, 0], label: [294, 22] },
  steps: { path: "M452,26 Q534,36 540,92", tip: [540, 92, 86], label: [546, 40] },
  results: { path: "M506,92 Q484,60 444,48", tip: [444, 48, 200], label: [450, 84] },
  tokens: { path: "M390,48 Q378,150 289,182", tip: [289, 182, 158], label: [414, 140] },
  text: { path: "M183,188 Q90,176 64,130", tip: [64, 130, 248], label: [82, 186] },
};
const count = (number) => Math.round(number).toLocaleString("en");
const milliseconds = (ms) => (ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`);

let before; // the last look: {at, tokens}

export function draw(told) {
  figures(told);
  at("drawing").replaceChildren(drawing(told));
  at("hops").tBodies[0].replaceChildren(...told.hops.map(row));
  at("blocks").replaceChildren(...told.blocks.flatMap(blocks));
}

export function explain(message) {
  before = undefined;
  at("figures").replaceChildren();
  at("drawing").replaceChildren(element("p", { class: "hint" }, message));
  at("hops").tBodies[0].replaceChildren();
  at("blocks").replaceChildren();
}

function figures(told) {
  const now = { at: performance.now(), tokens: told.figures.generated_tokens };
  const speed = before && now.tokens >= before.tokens ? (now.tokens - before.tokens) / ((now.at - before.at) / 1000) : 0;
  before = now;
  const { blocks_used: used, blocks_total: total } = told.figures;
  const shown = {
    running: count(told.figures.running),
    waiting: count(told.figures.waiting),
    "tokens/s": count(speed),
    "KV held": total ? `${((100 * used) / total).toFixed(1)} %` : "–",
  };
  at("figures").replaceChildren(...Object.entries(shown).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function drawing(told) {
  const ready = {};
  for (const service of told.services) {
    ready[service.kind] ||= [0, 0];
    ready[service.kind][0] += service.state === "ready";
    ready[service.kind][1] += service.state !== "gone";
  }
  const inner = told.hops.flatMap((hop) => way(hop));
  for (const [kind, [x, y]] of Object.entries(PLACES)) {
    const [good, all] = ready[kind] || [0, 0];
    inner.push(
      drawn("rect", { class: good ? "service" : "service is-missing", x: x - 52, y: y - 18, width: 104, height: 36, rx: 8 }),
      drawn("text", { x, y: y - 1 }, kind),
      drawn("text", { class: "quiet", x, y: y + 13 }, `${good} of ${all} ready`),
    );
  }
  const said = told.hops.map((hop) => `${hop.from} to ${hop.to}: ${hop.rate.toFixed(1)} a second`).join("; ");
  return drawn("svg", { viewBox: "0 0 600 222", role: "img", "aria-label": said }, ...inner);
}

function way(hop) {
  const { path, tip: [x, y, turn], label: [left, top] } = WAYS[hop.hop];
  const busy = hop.rate > 0 ? " is-busy" : "";
  return [
    drawn("path", { class: `way${busy}`, d: path }),
    drawn("path", { class: `tip${busy}`, d: "M0,0 L-9,-4.5 L-9,4.5 Z", transform: `translate(${x},${y}) rotate(${turn})` }),
    drawn("text", { class: "quiet", x: left, y: top }, `${hop.hop} ${hop.rate >= 10 ? count(hop.rate) : hop.rate.toFixed(1)}/s`),
  ];
}

const row = (hop) => element("tr", { "data-hop": hop.hop },
  element("td", { title: `${hop.from} → ${hop.to}` }, hop.hop),
  element("td", {}, count(hop.entries)),
  element("td", {}, hop.waiting.toFixed(1)),
  element("td", {}, hop.rate.toFixed(1)),
  element("td", {}, milliseconds(hop.wait_p50_ms)),
  element("td", {}, milliseconds(hop.wait_p99_ms)));

function blocks(map) {
  const share = (shares) => shares.reduce((sum, each) => sum + each, 0) / Math.max(1, shares.length);
  const said = `${map.worker}: ${(100 * share(map.used)).toFixed(1)} % held, ${(100 * share(map.cached)).toFixed(1)} % kept`;
  const each = map.group_size > 1 ? `, ${map.group_size} in a cell` : "";
  return [
    element("div", { class: "worker" }, `${said} of ${count(map.num_blocks)} blocks${each}`),
    element("div", { class: "map", role: "img", "aria-label": said, "data-worker": map.worker },
      ...map.used.map((used, group) => cell(used, map.cached[group]))),
  ];
}

// Held from the bottom up, and what is kept above it.
function cell(used, cached) {
  if (!used && !cached) return element("i", { class: "cell" });
  const bar = (name, from, share) => drawn("rect", { class: name, x: 0, width: 1, y: 1 - from - share, height: share });
  const picture = drawn("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" }, bar("used", 0, used), bar("cached", used, cached));
  return element("i", { class: "cell", "data-used": used, "data-cached": cached }, picture);
}
