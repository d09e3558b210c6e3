// A streamed request to the API.

import { request } from "./key.js";

/** Yields the data of each event; throws the server's own words where it refuses or fails. */
export async function* events(body, signal) {
  const response = await request("/v1/chat/completions", () => ({
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  }));
  if (!response.ok) {
    const text = await response.text();
    let message = `the server answered ${response.status}`;
    try {
      message = JSON.parse(text).error.message;
    } catch {
      // whatever stands between this page and the server has its own words
    }
    throw new Error(message);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    for (const event of found) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
