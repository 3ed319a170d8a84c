// Asks /live twice a second and shows the answer. Text from others is inserted as text only, never as HTML.
"use strict";

const EVERY_MS = 500;
const RATE_OVER_S = 10;
const COMPLETED_OVER_S = 60; // requests end less often than tokens arrive
const BAD = new Set(["unreachable", "gone", "unfit", "hung"]);
const $ = (id) => document.getElementById(id);

const seen = []; // snapshots of the last COMPLETED_OVER_S
let key = "";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// Numbers for people

function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value >= 100 ? value.toFixed(0) : value.toFixed(value && value < 10 ? 2 : 1);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < 3) [value, unit] = [value / 1024, unit + 1];
  return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}

// The loop

async function look() {
  try {
    const response = await fetch("live", { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (response.status === 401) {
      $("login").hidden = false;
      return told("an API key is needed", true);
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    $("login").hidden = key === "";
    show(await response.json());
    told("live");
  } catch (error) {
    told("the router does not answer", true);
    $("router").querySelector(".card").classList.add("unreachable");
  } finally {
    setTimeout(look, EVERY_MS);
  }
}

function told(text, bad = false) {
  const pill = $("connection");
  if (pill.textContent !== text) pill.textContent = text; // screen readers announce each change
  pill.classList.toggle("bad", bad);
}

function show(now) {
  if (seen.length && now.clock < seen.at(-1).clock) seen.length = 0; // another router process
  seen.push(now);
  while (now.clock - seen[0].clock > COMPLETED_OVER_S) seen.shift();
  $("model").textContent = now.model;
  $("registry").hidden = now.router.registry === "reachable";
  $("registry").textContent = `registry ${now.router.registry}`;
  $("registry").classList.add("bad");
  showNumbers(now);
  showPools(now);
  showRecent(now);
}

function rate(name, overS = RATE_OVER_S) {
  const last = seen.at(-1);
  const first = seen.find((one) => last.clock - one.clock <= overS);
  const seconds = last.clock - first.clock;
  return seconds > 0 ? Math.max(0, last.totals[name] - first.totals[name]) / seconds : 0;
}

function showNumbers(now) {
  const { attainment, objectives } = now.slo;
  const judged = Object.keys(objectives).length > 0;
  const share = attainment === null ? "" : `, ${(100 * attainment).toFixed(0)} % meet the SLO`;
  put("goodput", short(rate("met", COMPLETED_OVER_S)), judged ? `goodput, requests/s${share}` : "requests/s completed (no SLO is set)");
  const meter = $("goodput").querySelector("meter");
  meter.hidden = attainment === null;
  if (attainment !== null) Object.assign(meter, { value: attainment, low: 0.9, high: 0.95, optimum: 1 });
  put("flight", `${now.router.inflight}`, `in flight${now.router.queued ? `, ${now.router.queued} queued` : ""}`);
  put("tokens", short(rate("output_tokens")), "output tokens/s");
  const { cached_tokens: cached, prompt_tokens: prompt } = now.totals;
  put("cached", prompt ? `${((100 * cached) / prompt).toFixed(0)} %` : "–", "prompt tokens cached");
  put("moved", bytes(rate("handoff_bytes")), `KV moved/s, ${now.totals.handoffs} handoff${now.totals.handoffs === 1 ? "" : "s"}`);
}

function put(id, value, caption) {
  $(id).querySelector("b").textContent = value;
  $(id).querySelector("span").textContent = caption;
}

// Pools

function showPools(now) {
  const cards = new Map();
  for (const worker of now.workers) cards.set(worker.name, card(worker));
  for (const [name, element] of cards) element.querySelector(".chips").replaceChildren(...chips(now, name));
  for (const role of ["prefill", "decode"]) {
    const pool = $(role);
    for (const old of pool.querySelectorAll(".card")) if (!cards.has(old.dataset.worker)) old.remove();
    pool.hidden = ![...cards.values()].some((element) => element.parentElement === pool);
  }
  const router = $("router").querySelector(".card");
  router.classList.remove("unreachable");
  $("router").querySelector("h2").textContent = now.routers.length > 1 ? `${now.routers.length} routers` : "Router";
  router.querySelector(".detail").textContent = `${now.router.inflight} in flight, ${now.router.queued} queued`;
  router.querySelector(".chips").replaceChildren(...chips(now, ""));
  drawWires(now, cards, router);
}

function card(worker) {
  const pool = $(worker.role);
  let element = [...pool.querySelectorAll(".card")].find((each) => each.dataset.worker === worker.name);
  if (!element) {
    element = make("div", { class: "card", "data-worker": worker.name },
      make("div", { class: "head" }, make("b", {}, worker.name), make("span", { class: "state" })),
      make("div", { class: "blocks" }, make("i")), make("div", { class: "detail" }), make("div", { class: "chips" }));
    pool.append(element);
  }
  element.className = `card ${worker.state}`;
  element.querySelector(".state").textContent = worker.state;
  const used = BAD.has(worker.state) ? 0 : worker.blocks_in_use / worker.kv_blocks;
  element.querySelector(".blocks i").style.width = `${100 * used}%`;
  const waiting = worker.waiting ? `, ${worker.waiting} waiting` : "";
  const leases = worker.leases ? `, ${worker.leases} lease${worker.leases === 1 ? "" : "s"}` : "";
  element.querySelector(".detail").textContent = BAD.has(worker.state)
    ? { gone: "left without draining", unreachable: "does not answer", unfit: "serves another model", hung: "makes no progress" }[worker.state]
    : `${worker.running} running${waiting}${leases} · KV ${(100 * used).toFixed(0)} % of ${worker.kv_blocks} blocks in use, ${worker.cached_blocks} cached`;
  return element;
}

function chips(now, name) {
  return now.requests.filter((request) => request.worker === name)
    .map((request) => make("i", { class: request.stage, title: `${request.request_id}: ${request.stage}, ${request.output_tokens} tokens` }));
}

function drawWires(now, cards, router) {
  const workers = (role) => now.workers.filter((worker) => worker.role === role);
  const busy = new Set();
  for (const request of now.requests) {
    const [from, to] = [request.prefill_worker, request.decode_worker];
    if (request.stage === "prefill" && from) busy.add(`>${from}`);
    if (["transfer", "decode"].includes(request.stage) && from && to) busy.add(`${from}>${to}`);
    if (!from && to) busy.add(`>${to}`);
  }
  const pairs = workers("prefill").flatMap((one) => [["", one.name], ...workers("decode").map((other) => [one.name, other.name])]);
  const colocated = workers("prefill").length === 0;
  const direct = workers("decode").filter((worker) => colocated || busy.has(`>${worker.name}`)); // without a prefill worker
  pairs.push(...direct.map((worker) => ["", worker.name]));
  const flow = $("flow").getBoundingClientRect();
  const between = colocated ? null : $("prefill").getBoundingClientRect();
  const stacked = getComputedStyle($("flow")).gridTemplateColumns.split(" ").length === 1;
  const paths = pairs.map(([from, to]) => {
    const [a, b] = [from ? cards.get(from) : router, cards.get(to)].map((element) => element.getBoundingClientRect());
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const [x1, y1, x2, y2] = stacked
      ? [a.left + a.width / 2, a.bottom, b.left + b.width / 2, b.top]
      : [a.right, a.top + a.height / 2, b.left, b.top + b.height / 2];
    const start = [x1 - flow.left, y1 - flow.top];
    const end = [x2 - flow.left, y2 - flow.top];
    const past = from || !between || cards.get(to).parentElement.id === "prefill" ? null : { x: between.left - flow.left - 8, y: between.bottom - flow.top - 4 };
    path.setAttribute("d", past ? around(start, end, past, stacked) : curve(start, end, stacked));
    path.setAttribute("class", busy.has(`${from}>${to}`) ? "busy" : "");
    return path;
  });
  $("wires").replaceChildren(...paths);
}

function curve([ax, ay], [bx, by], stacked) {
  const [mx, my] = [(ax + bx) / 2, (ay + by) / 2];
  return `M${ax} ${ay} C${stacked ? `${ax} ${my} ${bx} ${my}` : `${mx} ${ay} ${mx} ${by}`} ${bx} ${by}`;
}

// Leads around the prefill pool, which would hide the line: under it, or to its left if the pools are stacked.
function around([ax, ay], [bx, by], past, stacked) {
  if (stacked) return `M${ax} ${ay} C${past.x} ${ay} ${past.x} ${ay} ${past.x} ${ay + 40} V${by - 40} C${past.x} ${by} ${past.x} ${by} ${bx} ${by}`;
  const [left, right] = [past.x + 8, bx - 90];
  const [near, far] = [(ax + left) / 2, (right + bx) / 2];
  return `M${ax} ${ay} C${near} ${ay} ${near} ${past.y} ${left} ${past.y} H${right} C${far} ${past.y} ${far} ${by} ${bx} ${by}`;
}

// Requests that have ended

function bar(record) {
  const whole = record.e2e || 1e-9;
  return make("div", { class: "bar" }, ...record.laps.map((lap) =>
    make("i", { class: lap.stage, title: `${lap.stage} ${lap.worker} ${time(lap.end - lap.start)}`, style: { width: `${(100 * (lap.end - lap.start)) / whole}%` } })));
}

function showRecent(now) {
  $("recent").tBodies[0].replaceChildren(...now.recent.map((record) => {
    const ok = record.outcome === "ok";
    const tokens = `${record.prompt_tokens} → ${record.output_tokens}`;
    return make("tr", {}, make("td", { title: record.request_id }, record.request_id || "–"),
      ok ? make("td", {}, bar(record)) : make("td", { class: "failed" }, `${record.outcome}: ${record.reason}`),
      make("td", {}, time(record.ttft)), make("td", {}, time(record.e2e)), make("td", {}, tokens));
  }));
  $("errors").replaceChildren(...(now.errors.length
    ? now.errors.map((error) => make("li", { class: "failed" },
      `${new Date(1000 * error.at).toLocaleTimeString()} ${error.reason}${error.worker ? ` at ${error.worker}` : ""} · ${error.request_id}`))
    : [make("li", {}, "none")]));
}

// Playground

let asking = null;

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
    for (const part of parts) yield part.replace(/^data: /, "").replace(/\nid: .*$/, "");
  }
}

async function showStages(id) {
  const response = await fetch(`live/${encodeURIComponent(id)}`, { headers: headers() });
  if (!response.ok) return;
  const record = await response.json();
  const list = make("dl");
  for (const [stage, spent] of Object.entries(record.stages)) {
    const laps = record.laps.filter((lap) => lap.stage === stage);
    const worker = [...new Set(laps.map((lap) => lap.worker).filter(Boolean))].join(", ");
    list.append(make("dt", {}, stage), make("dd", {}, details(stage, record, worker)), make("dd", {}, time(spent)));
  }
  $("stages").replaceChildren(bar(record), list);
}

function details(stage, record, worker) {
  const moved = record.handoff;
  if (stage === "prefill" && record.cached_tokens) return `${worker}, ${record.cached_tokens} of ${record.prompt_tokens} tokens were cached`;
  if (stage === "transfer") return moved.transport ? `${moved.transport}: ${moved.blocks} blocks, ${bytes(moved.bytes)}` : "no KV moved";
  if (stage === "decode" && record.tpot) return `${worker}, ${time(record.tpot)} per token${record.retries ? `, ${record.retries} ${record.retries === 1 ? "retry" : "retries"}` : ""}`;
  return worker;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) asking.abort();
  else ask();
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
});
look();
