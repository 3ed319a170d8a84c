// Asks the model through the HTTP door, and shows the stages of the answer.
import { $, bar, bytes, count, get, headers, make, time } from "./show.js";
import { offered, run } from "./tools.js";

const MAX_ROUNDS = 8; // of calls, before the model must answer
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
  answer.replaceChildren();
  $("stages").replaceChildren();
  try {
    const messages = [{ role: "user", content: $("prompt").value }];
    for (let left = $("tools").checked ? MAX_ROUNDS : 0; ; left--) {
      const said = await turn(messages, answer, left > 0);
      if (!said.tool_calls.length) break;
      messages.push(said, ...said.tool_calls.map((call) => called(call, answer)));
    }
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

// Returns what the assistant said, as a message of the next request.
async function turn(messages, answer, mayCall) {
  const body = { messages, stream: true, max_tokens: Number($("max_tokens").value), temperature: Number($("temperature").value) };
  if ($("tools").checked) Object.assign(body, { tools: offered, tool_choice: mayCall ? "auto" : "none" });
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal: asking.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const said = { role: "assistant", content: "", tool_calls: [] };
  let thoughts = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.reasoning ?? delta.reasoning_content) {
      if (!thoughts) answer.append((thoughts = make("span", { class: "thoughts", title: "thinking" })));
      thoughts.append(delta.reasoning ?? delta.reasoning_content);
    }
    for (const { index, ...call } of delta.tool_calls ?? []) {
      if (call.id) said.tool_calls[index] = call;
      else said.tool_calls[index].function.arguments += call.function.arguments;
    }
    said.content += delta.content ?? "";
    answer.append(delta.content ?? "");
  }
  const id = response.headers.get("x-request-id");
  if (id) await showStages(id);
  return said;
}

// Runs a call and shows it. Returns its result as a message.
function called(call, answer) {
  const result = run(call.function.name, call.function.arguments);
  answer.append(make("span", { class: "call", title: "a call and its result" }, `${call.function.name} ${call.function.arguments} → ${result}`));
  return { role: "tool", tool_call_id: call.id, content: result };
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
