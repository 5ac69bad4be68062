// How the page talks to the server: with the tab's API key, and nowhere else.

const KEY = "jaxllm.api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

// An answer with an error status. `message` is the server's own.
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// GET, or POST of a JSON body. Paths are relative, so that the server may lie below a path of a proxy. Throws
// ApiFailure, and what fetch throws.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    body: body && JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new ApiFailure(response.status, await errorMessage(response));
  return response;
}

async function errorMessage(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

// The objects of a stream of server-sent events, until it says that it ends. An error in the stream is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection to the server broke off.");
    text += value;
    const parts = text.split(/\r?\n\r?\n/);
    text = parts.pop();
    for (const part of parts) {
      const data = part
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiFailure(500, event.error.message);
      yield event;
    }
  }
}
