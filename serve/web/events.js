// Server-sent events of a response's body, as the objects in their data.

const END = "[DONE]";

export async function* eventsOf(body) {
  let text = "";
  for await (const chunk of chunksOf(body.pipeThrough(new TextDecoderStream()))) {
    text += chunk;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length && data[0] !== END) yield JSON.parse(data.join("\n"));
    }
  }
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
