// Calls of the gateway. Keys stay in this tab.

const RECONNECT_MS = 500;
const PATIENCE_MS = 60_000; // for a gateway that is away

export const keys = {
  get api() { return sessionStorage.getItem("penstock-api-key") || ""; },
  set api(key) { sessionStorage.setItem("penstock-api-key", key); },
  get control() { return sessionStorage.getItem("penstock-control-token") || ""; },
  set control(token) { sessionStorage.setItem("penstock-control-token", token); },
};

// An answer that is an error, in the gateway's own words.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  const all = { ...more };
  if (keys.api) all.authorization = `Bearer ${keys.api}`;
  if (keys.control) all["x-penstock-control-token"] = keys.control;
  return all;
}

async function refusal(reply) {
  const body = await reply.text();
  try {
    return new Refusal(reply.status, JSON.parse(body).error.message);
  } catch {
    return new Refusal(reply.status, `HTTP ${reply.status}: ${body.slice(0, 200)}`);
  }
}

async function get(path) {
  const reply = await fetch(path, { headers: headers() });
  if (!reply.ok) throw await refusal(reply);
  return reply.json();
}

export const models = async () => (await get("v1/models")).data;
export const pipeline = (pool) => get(`v1/pipeline?pool=${encodeURIComponent(pool)}`);
export const timeline = (id) => get(`v1/requests/${encodeURIComponent(id)}/timeline`);
export const poolOf = (id) => id.slice(0, Math.max(0, id.lastIndexOf("-")));

// The events of a body as they come: {id, data}; comments are passed over.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { id: "", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

// A chat's chunks. When the connection breaks, the stream goes on after the last event, through any gateway that
// answers at this address.
export async function* chat(call, signal, accepted) {
  let reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json", "x-penstock-resumable": "true" }),
    body: JSON.stringify({ ...call, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!reply.ok) throw await refusal(reply);
  const id = reply.headers.get("x-penstock-request-id");
  accepted(id);
  let last = "";
  let until = 0;
  for (;;) {
    try {
      for await (const event of events(reply.body)) {
        until = 0;
        if (event.id) last = event.id;
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Refusal(0, chunk.error.message);
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refusal) throw error;
    }
    until ||= Date.now() + PATIENCE_MS;
    reply = await again(id, last, signal, until);
  }
}

async function again(id, last, signal, until) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
    try {
      const more = last ? { "last-event-id": last } : {};
      const reply = await fetch(`v1/requests/${encodeURIComponent(id)}/events`, { headers: headers(more), signal });
      if (reply.ok) return reply;
      if (reply.status !== 503 && reply.status !== 502) throw await refusal(reply);
    } catch (error) {
      if (signal.aborted || error instanceof Refusal) throw error;
    }
    if (Date.now() > until) throw new Refusal(0, "The gateway does not answer any more. Send the message again.");
  }
}

// The request is not computed on; it was resumable, so that to hang up would not be enough.
export const cancel = (id) => fetch(`v1/requests/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers() });
