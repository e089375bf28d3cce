// Reads server-sent events with fetch: unlike EventSource it can send the key, and it shows comments.
export const key = {
  get: () => sessionStorage.getItem("marathon-key") || "",
  set: (value) => sessionStorage.setItem("marathon-key", value),
};

export function headers(more = {}) {
  return key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;
}

// Yields {event, data, comment}; data is text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) yield parse(block);
  }
}

function parse(block) {
  const found = { event: "message", data: "", comment: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("data: ")) found.data += line.slice(6);
    else if (line.startsWith("event: ")) found.event = line.slice(7);
    else if (line.startsWith(": ")) found.comment = line.slice(2);
  }
  return found;
}
