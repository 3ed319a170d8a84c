// The requests that ended, page by page and sorted by any column; the trace of one of them; errors; the oldest requests in flight.
import { $, bar, bytes, clock, count, date, get, kind, make, time } from "./show.js";

const ROWS = 20;
const FOLLOW_MS = 2000; // new requests are added at most this often
const MOST_OPEN = 6;
const STAGES = [...document.querySelectorAll("#ended th.stage button")].map((button) => button.dataset.sort);

const NARROWED = { outcome: "outcome", worker: "at_worker", tenant: "tenant" }; // field of the question → element
const asked = { sort: "age", ascending: false, skip: 0 };
let matched = 0;
let ended = -1; // how many requests had ended when the list was last asked for
let askedAt = 0;
let latest = 0; // the number of the last question: an answer to an earlier one is out of date

// The list follows by itself while its first page shows the newest ones and nobody is about to use a link in it.
export function showList(endedNow) {
  const following = asked.sort === "age" && !asked.ascending && asked.skip === 0 && !$("ended").tBodies[0].contains(document.activeElement);
  if ((ended < 0 || (following && endedNow !== ended)) && Date.now() - askedAt >= FOLLOW_MS) {
    ended = endedNow;
    load();
  }
}

async function load() {
  askedAt = Date.now();
  const question = ++latest;
  const query = new URLSearchParams({ sort: asked.sort, ascending: asked.ascending, skip: asked.skip, limit: ROWS, failed: $("only_failed").checked });
  if ($("slower_than").valueAsNumber > 0) query.set("slower_than", $("slower_than").value);
  for (const [name, id] of Object.entries(NARROWED)) if ($(id).value) query.set(name, $(id).value);
  try {
    const told = await get(`requests?${query}`);
    if (question === latest) show(told);
    $("tenant").setCustomValidity("");
  } catch (error) {
    if (question !== latest) return;
    const refused = error.status === 400 && $("tenant").value; // the key's own requests alone may be asked for
    $("tenant").setCustomValidity(refused ? "only a key with admin=yes may ask for another tenant" : "");
    if (refused) $("tenant").reportValidity();
    else ended = -1; // ask again when there is a connection
  }
}

function show(told) {
  matched = told.matched;
  const rows = told.requests;
  const longest = Math.max(...rows.map((record) => record.e2e), 0);
  const tenants = rows.some((record) => record.tenant);
  document.querySelector("#ended th.tenant").hidden = !tenants;
  if (tenants) $("of_tenant").hidden = false;
  $("scale").textContent = rows.length ? `0 – ${time(longest)}` : "";
  $("ended").tBodies[0].replaceChildren(...rows.map((record) => row(record, longest, tenants)));
  $("range").textContent = rows.length ? `${told.skip + 1}–${told.skip + rows.length} of ${matched}` : "none";
  $("first").disabled = $("earlier").disabled = told.skip === 0;
  $("later").disabled = told.skip + rows.length >= matched;
  for (const button of document.querySelectorAll("#ended button[data-sort]")) {
    const sorted = asked.ascending ? "ascending" : "descending";
    button.closest("th").setAttribute("aria-sort", button.dataset.sort === asked.sort ? sorted : "none");
  }
}

function row(record, longest, tenants) {
  const ok = record.outcome === "ok";
  const cells = [
    make("th", { scope: "row" }, link(record.request_id)),
    make("td", { title: date(record.at) }, clock(record.at)),
    ...(tenants ? [make("td", {}, record.tenant)] : []),
    make("td", { class: "more how" }, ok ? record.reason : `${record.outcome}: ${record.reason}`),
    make("td", { class: "stages" }, bar(record, longest)),
    ...[record.e2e, record.ttft].map((value) => make("td", {}, time(value))),
    ...STAGES.map((stage) => make("td", { class: "stage" }, record.stages[stage] ? time(record.stages[stage]) : "–")),
    make("td", { class: "more" }, `${record.prompt_tokens} → ${record.output_tokens}`),
    make("td", { class: "more" }, record.retries ? `${record.retries}` : ""),
  ];
  return make("tr", ok ? {} : { class: "failed" }, ...cells);
}

// The link leads to the record as data; a plain click shows it on the page.
function link(id) {
  if (!id) return "–";
  const element = make("a", { href: `live/${encodeURIComponent(id)}`, title: id }, id);
  element.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    location.hash = `request=${encodeURIComponent(id)}`;
  });
  return element;
}

// One request

async function openNamed() {
  const id = /^#request=(.+)$/.exec(location.hash)?.[1];
  if (!id) return $("trace").close();
  let record = null;
  try {
    record = await get(`live/${id}`);
  } catch {
    // the connection is lost, or a key is needed: said elsewhere
  }
  $("trace_title").textContent = decodeURIComponent(id);
  const raw = make("a", { href: `live/${id}` }, "the record as JSON");
  $("trace_body").replaceChildren(...(record ? [waterfall(record), facts(record), raw] : ["No request with this id is kept."]));
  if (!$("trace").open) $("trace").showModal();
}

function waterfall(record) {
  const whole = Math.max(record.e2e, ...record.laps.map((lap) => lap.end)) || 1e-9;
  const at = (start, end) => ({ left: `${(100 * start) / whole}%`, width: `${(100 * (end - start)) / whole}%` });
  const rows = [
    ...record.laps.map((lap) => [lap.start, 1, [kind(lap), lap.worker, make("i", { class: kind(lap), style: at(lap.start, lap.end) }), time(lap.end - lap.start)]]),
    ...record.failures.map((failure) => [failure.at, 0, ["✗", `${failure.worker}: ${failure.reason}`, make("i", { class: "bad", style: at(failure.at, failure.at) }), `at ${time(failure.at)}`]]),
  ].sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  return make("table", { class: "waterfall" }, make("tbody", {}, ...rows.map(([, isLap, [name, worker, mark, spent]]) =>
    make("tr", isLap ? {} : { class: "failed" }, make("td", {}, name), make("td", {}, worker), make("td", { class: "axis" }, mark), make("td", {}, spent)))));
}

function facts(record) {
  const moved = record.handoff;
  const told = {
    arrived: date(record.at),
    ended: `${record.outcome}: ${record.reason}, after ${time(record.e2e)}`,
    tenant: record.tenant,
    "first token": record.ttft === null ? "" : `after ${time(record.ttft)}${record.tpot === null ? "" : `, then ${time(record.tpot)} a token`}`,
    prompt: `${count(record.prompt_tokens, "token")}, ${record.cached_tokens} cached, ${record.fetched_tokens} fetched from another worker`,
    computed: (record.cache?.uncached ?? []).map((one) => `${one.tokens} ${one.cause}`).join(", "),
    "could be cached": record.cache ? `${record.cache.promised_tokens} promised, ${record.cache.reachable_tokens} reachable` : "",
    output: count(record.output_tokens, "token"),
    guesses: record.drafted_tokens ? `${record.accepted_tokens} of ${record.drafted_tokens} right` : "",
    choice: record.choices > 1 ? `${record.choice} of ${record.choices}, from one prompt` : "",
    prefill: record.prefill_compute ? `waited ${time(record.prefill_wait)}, computed ${time(record.prefill_compute)}` : "",
    bypass: record.bypasses.length ? `the decode worker computed the prompt (${record.bypasses.at(-1)})` : "",
    handoff: moved.transport ? `${moved.transport}: ${count(moved.blocks, "block")}, ${bytes(moved.bytes)}; ${moved.blocks_reused} were there` : "",
    "of it": moved.transport ? `connected ${time(record.connect)}, read ${time(record.read)}, verified ${time(record.verify)}; the rest waited for room and for the engine` : "",
    "KV not used": moved.failure ? `${moved.failure}; ${moved.recomputed_tokens} tokens computed again` : "",
    retries: record.retries ? `${record.retries}` : "",
    "objectives missed because of": record.slo_missed ?? "",
    "trace id": record.trace_id,
  };
  return make("dl", {}, ...Object.entries(told).filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

// The workers to choose from: those that are there, and the one that is chosen.
export function offerWorkers(workers) {
  const select = $("at_worker");
  const names = workers.map((worker) => worker.name).sort();
  if (select.value && !names.includes(select.value)) names.push(select.value);
  if (document.activeElement === select || [...select.options].slice(1).map((option) => option.value).join() === names.join()) return;
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...names.map((name) => make("option", {}, name)));
  select.value = chosen;
}

// Errors, and what is in flight

export function showErrors(errors) {
  fill("errors", errors, "none", (error) => {
    const among = error.requests < error.count ? ` from ${count(error.requests, "request")}` : "";
    return [`${error.outcome}: ${error.reason}`, `${error.count}${among}`, make("span", { title: date(error.at) }, clock(error.at)),
      make("span", {}, link(error.request_id), error.worker ? ` at ${error.worker}` : "")];
  }, "failed");
}

export function showOpen(requests) {
  fill("open", requests.slice(0, MOST_OPEN), "none", (request) => [
    make("span", { title: request.request_id }, request.request_id || "–"),
    make("span", {}, make("i", { class: `dot ${kind(request)}` }), ` ${kind(request)}${request.worker ? ` at ${request.worker}` : ""}${request.retries ? `, tried ${request.retries + 1} times` : ""}`),
    `${request.prompt_tokens} → ${request.output_tokens}`, time(request.age)]);
}

// Replaces the rows, unless someone is about to use a link in them.
function fill(id, items, none, cells, style = "") {
  const body = $(id).tBodies[0];
  if (body.contains(document.activeElement)) return;
  const rows = items.map((item) => make("tr", style ? { class: style } : {}, ...cells(item).map((cell) => make("td", {}, cell))));
  body.replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: "4", class: "note" }, none))]));
}

// Use of the list

function turn(change) {
  Object.assign(asked, change);
  load();
}

for (const button of document.querySelectorAll("#ended button[data-sort]")) {
  button.addEventListener("click", () => {
    const same = asked.sort === button.dataset.sort;
    turn({ sort: button.dataset.sort, ascending: same && !asked.ascending, skip: 0 });
  });
}
$("only_failed").addEventListener("change", () => turn({ skip: 0 }));
for (const id of ["slower_than", ...Object.values(NARROWED)]) $(id).addEventListener("change", () => turn({ skip: 0 }));
$("first").addEventListener("click", () => turn({ skip: 0 }));
$("earlier").addEventListener("click", () => turn({ skip: Math.max(0, asked.skip - ROWS) }));
$("later").addEventListener("click", () => turn({ skip: asked.skip + ROWS }));
$("refresh").addEventListener("click", () => load());
$("trace").addEventListener("close", () => history.replaceState(null, "", location.pathname));
addEventListener("hashchange", openNamed);
if (location.hash) openNamed();
