// Asks the model through the HTTP door, and shows the stages of the answer.
import { $, bar, bytes, count, get, headers, make, time } from "./show.js";

let asking = null;

export function showPlayground() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (asking) asking.abort();
    else ask();
  });
}

async function ask() {
  asking = new AbortController();
  $("send").textContent = "Stop";
  const answer = $("answer");
  answer.className = "";
  answer.textContent = "";
  $("stages").replaceChildren();
  try {
    const body = {
      messages: [{ role: "user", content: $("prompt").value }], stream: true,
      max_tokens: Number($("max_tokens").value), temperature: Number($("temperature").value),
    };
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal: asking.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.append(chunk.choices[0]?.delta.content ?? "");
    }
    const id = response.headers.get("x-request-id");
    if (id) await showStages(id);
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.className = "bad";
      answer.append(`${error.message}`);
    }
  } finally {
    asking = null;
    $("send").textContent = "Send";
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}

async function showStages(id) {
  const record = await get(`live/${encodeURIComponent(id)}`);
  if (record === null) return;
  const list = make("dl");
  for (const [stage, spent] of Object.entries(record.stages)) {
    const laps = record.laps.filter((lap) => lap.stage === stage);
    const worker = [...new Set(laps.map((lap) => lap.worker).filter(Boolean))].join(", ");
    list.append(make("dt", {}, stage), make("dd", {}, details(stage, record, worker)), make("dd", {}, time(spent)));
  }
  $("stages").replaceChildren(bar(record, record.e2e), list);
}

function details(stage, record, worker) {
  const moved = record.handoff;
  if (stage === "prefill" && record.cached_tokens) return `${worker}, ${record.cached_tokens} of ${record.prompt_tokens} tokens were cached`;
  if (stage === "transfer") return moved.transport ? `${moved.transport}: ${count(moved.blocks, "block")}, ${bytes(moved.bytes)}${connected(record)}` : "no KV moved";
  if (stage === "decode" && record.tpot) return `${worker}, ${time(record.tpot)} per token${record.retries ? `, ${record.retries} ${record.retries === 1 ? "retry" : "retries"}` : ""}`;
  return worker;
}

// Only the first handoff between two processes connects them, and it then costs more than the rest.
const connected = (record) => (record.connect >= 0.001 ? `; ${time(record.connect)} of it to connect` : "");
