// The pools: a card for each worker with the requests that are there, and the ways of the requests between them.
import { $, bytes, count, draw, kind, make, percent } from "./show.js";

const LOST = new Set(["unreachable", "gone"]);
const BAD = new Set([...LOST, "unfit", "hung", "ejected", "unproven"]);
const MOST_DOTS = 40;
const MOST_WIRES = 150; // with more, only the busy ones are drawn
const GAP = 90; // between two pools, where the wires are

export function showPools(now) {
  const cards = new Map();
  for (const worker of now.workers) cards.set(worker.name, card(worker));
  for (const name of ["prefill", "decode"]) {
    const pool = $(name);
    for (const old of pool.querySelectorAll(".card")) if (!cards.has(old.dataset.worker)) old.remove();
    pool.querySelector(".more")?.remove();
    if (now.unlisted[name]) pool.append(make("p", { class: "note more" }, `and ${now.unlisted[name]} more, all ready`));
    pool.hidden = ![...cards.values()].some((element) => element.parentElement === pool);
  }
  const router = $("router").querySelector(".card");
  $("router").querySelector("h2").textContent = now.routers.length > 1 ? `${now.routers.length} routers` : "Router";
  router.querySelector(".detail").textContent = `${now.router.inflight} in flight in all, ${now.router.queued} queued`;
  router.querySelector(".here").replaceChildren(...dots(now.router.requests, "not at a worker"));
  drawWires(now, cards, router);
}

function card(worker) {
  const pool = $(worker.pool);
  let element = [...pool.querySelectorAll(".card")].find((each) => each.dataset.worker === worker.name);
  if (!element) {
    element = make("div", { class: "card", "data-worker": worker.name },
      make("div", { class: "head" }, make("b", {}, worker.name), make("span", { class: "state" })),
      make("div", { class: "blocks" }, make("i")), make("div", { class: "detail" }), make("div", { class: "gpus" }), make("div", { class: "tiers" }), make("div", { class: "here" }));
    pool.append(element);
  }
  element.className = `card ${worker.state}`;
  element.querySelector(".state").textContent = state(worker);
  const used = BAD.has(worker.state) ? 0 : worker.blocks_in_use / (worker.kv_blocks || 1);
  element.querySelector(".blocks i").style.width = `${100 * used}%`;
  element.querySelector(".detail").textContent = detail(worker, used);
  element.querySelector(".gpus").replaceChildren(...(LOST.has(worker.state) ? [] : worker.gpus.map(gpu)));
  element.querySelector(".tiers").replaceChildren(...(LOST.has(worker.state) ? [] : worker.tiers.map(tier)));
  element.querySelector(".here").replaceChildren(...dots(worker.requests, "here"));
  return element;
}

function state(worker) {
  if (!LOST.has(worker.state)) return worker.state;
  const since = `${worker.silent.toFixed(0)} s`;
  const told = worker.state === "gone" ? `lost ${since} ago` : `no answer for ${since}`;
  return worker.restarting ? `${told}; restarting` : told;
}

function detail(worker, used) {
  if (BAD.has(worker.state)) {
    return {
      gone: "it left without draining",
      unreachable: "it does not answer",
      unfit: "serves another model",
      hung: "makes no progress",
      ejected: "put aside: worse than its peers",
      unproven: "has not proved itself yet",
    }[worker.state];
  }
  const more = [`KV ${percent(used)} of ${worker.kv_blocks} blocks in use`, `${worker.cached_blocks} cached`];
  if (worker.pool === "decode" && worker.speculation && worker.speculation !== "none") more.push(`guesses: ${worker.speculation}`);
  if (worker.leases) more.push(count(worker.leases, "lease"));
  if (worker.waiting) more.push(`${worker.waiting} wait in its engine`);
  return more.join(" · ");
}

// A GPU of a worker: what its driver tells.
function gpu(one) {
  const told = [];
  if (one.memory_total) told.push(`${bytes(one.memory_used)} of ${bytes(one.memory_total)}`);
  if (one.busy !== null) told.push(`${percent(one.busy)} busy`);
  if (one.watts !== null) told.push(`${one.watts.toFixed(0)} W`);
  const errors = [[one.ecc_corrected, "corrected"], [one.ecc_uncorrected, "uncorrected"]].filter(([number]) => number !== null);
  const text = errors.some(([number]) => number) ? errors.map(([number, kind]) => `${number} ${kind}`).join(", ") : "none";
  if (errors.length) told.push(make("span", { class: one.ecc_uncorrected ? "bad" : "" }, `memory errors: ${text}`));
  const words = told.flatMap((part, i) => [i ? " · " : " ", part]);
  const element = make("div", { class: "gpu", title: one.name }, make("b", {}, /^\d+$/.test(one.gpu) ? `GPU ${one.gpu}` : "GPU slice"), ...words);
  if (one.memory_total) element.append(make("div", { class: "blocks" }, make("i", { style: { width: `${(100 * one.memory_used) / one.memory_total}%` } })));
  return element;
}

// A place for KV that has left the pool, and whether it pays.
function tier(one) {
  const told = [`${one.blocks} of ${one.capacity} blocks`, `${one.hits} of ${one.reads} came back`];
  const watches = one.state === "watching";
  const off = one.state !== "on" && !watches;
  const gain = one.saved_s - one.spent_s;
  const worth = watches ? `only watches: ${one.why}` : off ? [one.state, one.why].filter(Boolean).join(": ") : `${gain < 0 ? "costs" : "saves"} ${Math.abs(gain).toFixed(1)} s in 10 min`;
  return make("div", { class: "gpu" }, make("b", {}, one.medium), ` ${told.join(" · ")} · `, make("span", { class: off ? "bad" : "" }, worth));
}

// As many dots as the number beside them says.
function dots(requests, where) {
  const stages = Object.entries(requests);
  const total = stages.reduce((sum, [, number]) => sum + number, 0);
  if (!total) return [];
  const all = stages.flatMap(([stage, number]) => Array(Math.min(number, MOST_DOTS)).fill(stage)).slice(0, MOST_DOTS);
  const told = stages.map(([stage, number]) => `${number} ${stage}`).join(", ");
  return [make("span", { class: "chips", "aria-hidden": "true" }, ...all.map((stage) => make("i", { class: stage }))),
    make("span", { class: "note" }, `${total > all.length ? `+${total - all.length} = ` : ""}${total} ${where}: ${told}`)];
}

// From each place to each other at which a request is now: the kind of work that keeps the way busy.
function waysInUse(requests) {
  const busy = new Map();
  for (const request of requests) {
    const [from, to] = [request.prefill_worker, request.decode_worker];
    if (request.stage === "prefill" && request.worker) busy.set(`>${request.worker}`, kind(request));
    else if (["transfer", "decode"].includes(request.stage) && to) busy.set(from ? `${from}>${to}` : `>${to}`, from ? "transfer" : "bypass");
  }
  return busy;
}

function drawWires(now, cards, router) {
  const workers = (pool) => now.workers.filter((worker) => worker.pool === pool);
  const busy = waysInUse(now.requests);
  const colocated = workers("prefill").length === 0;
  let pairs = workers("prefill").flatMap((one) => [["", one.name], ...workers("decode").map((other) => [one.name, other.name])]);
  const direct = workers("decode").filter((worker) => colocated || busy.has(`>${worker.name}`)); // without a prefill worker
  pairs.push(...direct.map((worker) => ["", worker.name]));
  if (pairs.length > MOST_WIRES) pairs = pairs.filter(([from, to]) => busy.has(`${from}>${to}`)).slice(0, MOST_WIRES);
  const flow = $("flow").getBoundingClientRect();
  const between = colocated ? null : $("prefill").getBoundingClientRect();
  const stacked = getComputedStyle($("flow")).gridTemplateColumns.split(" ").length === 1;
  const boxes = new Map([["", router], ...cards].map(([name, element]) => [name, element.getBoundingClientRect()]));
  const paths = pairs.map(([from, to]) => {
    const [a, b] = [boxes.get(from), boxes.get(to)];
    const [x1, y1, x2, y2] = stacked
      ? [a.left + a.width / 2, a.bottom, b.left + b.width / 2, b.top]
      : [a.right, a.top + a.height / 2, b.left, b.top + b.height / 2];
    const start = [x1 - flow.left, y1 - flow.top];
    const end = [x2 - flow.left, y2 - flow.top];
    const past = from || !between || cards.get(to).parentElement.id === "prefill" ? null : { x: between.left - flow.left - 8, y: between.bottom - flow.top - 4 };
    const used = busy.get(`${from}>${to}`);
    return draw("path", { d: past ? around(start, end, past, stacked) : curve(start, end, stacked), class: used ? `busy ${used}` : "" });
  });
  $("wires").replaceChildren(...paths.sort((one, other) => one.classList.length - other.classList.length)); // the busy ones on top
}

function curve([ax, ay], [bx, by], stacked) {
  const [mx, my] = [(ax + bx) / 2, (ay + by) / 2];
  return `M${ax} ${ay} C${stacked ? `${ax} ${my} ${bx} ${my}` : `${mx} ${ay} ${mx} ${by}`} ${bx} ${by}`;
}

// Leads around the prefill pool, which would hide the line: under it, or to its left if the pools are stacked.
function around([ax, ay], [bx, by], past, stacked) {
  if (stacked) return `M${ax} ${ay} C${past.x} ${ay} ${past.x} ${ay} ${past.x} ${ay + 40} V${by - 40} C${past.x} ${by} ${past.x} ${by} ${bx} ${by}`;
  const [left, right] = [past.x + 8, bx - GAP];
  const [near, far] = [(ax + left) / 2, (right + bx) / 2];
  return `M${ax} ${ay} C${near} ${ay} ${near} ${past.y} ${left} ${past.y} H${right} C${far} ${past.y} ${far} ${by} ${bx} ${by}`;
}
