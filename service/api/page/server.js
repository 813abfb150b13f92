// Asks the server. Server-sent events are read from a fetch, because EventSource cannot show a key.

export const keys = { api: "", operator: "" };

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(method, path, { key = keys.api, body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const content = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(path, { method, headers, body: content, signal, cache: "no-store" });
  if (!response.ok) throw new Refusal(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (pending + value).split("\n\n");
    pending = frames.pop();
    yield* frames.map(parsed).filter((event) => event.data !== "");
  }
}

function parsed(frame) {
  const event = { name: "message", data: "" };
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
