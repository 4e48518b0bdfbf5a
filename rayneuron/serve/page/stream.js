// One chat completion over fetch: server-sent events in, callbacks out.

export class ServerError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// The server's own words about a reply that is not 2xx, whatever its body is.
export async function errorOf(reply) {
  const text = await reply.text().catch(() => "");
  let message = text.slice(0, 500).trim();
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? body.detail ?? message;
  } catch {
    // not JSON: the text itself
  }
  return new ServerError(String(message || reply.statusText || "no reason given"), reply.status, reply.headers.get("retry-after"));
}

// Resolves when the stream has ended with [DONE]; rejects with ServerError, or AbortError after signal.abort().
export async function complete(body, { key, signal, onText, onFinish, onUsage }) {
  const reply = await fetch("v1/chat/completions", { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!reply.ok) throw await errorOf(reply);
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "the server failed while answering", chunk.error.code ?? 500);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) onText(choice.delta.content);
    if (choice?.finish_reason) onFinish(choice.finish_reason);
    if (chunk.usage) onUsage(chunk.usage);
  }
  throw new ServerError("the connection ended before the answer did", 0);
}

// The data of each event; a chunk of bytes may end anywhere, in the middle of a character too.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, ""));
      if (data.length) yield data.join("\n");
    }
  }
}
