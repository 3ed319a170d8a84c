// Asks /live twice a second and shows the answer; the curves, the planner and the list of requests ask for themselves.
import { loadCurves } from "./curves.js";
import { loadPlans } from "./plans.js";
import { showPlayground } from "./playground.js";
import { showPools } from "./pools.js";
import { offerWorkers, showErrors, showList, showOpen } from "./requests.js";
import { $, bytes, clock, count, get, hasKey, percent, short, useKey } from "./show.js";

const EVERY_MS = 500;
const RATE_OVER_S = 10;
const COMPLETED_OVER_S = 60; // requests end less often than tokens arrive

const seen = []; // snapshots of the last COMPLETED_OVER_S
let answeredAt = null; // when the router last answered

async function look() {
  try {
    show(await get("live"));
    answeredAt = Date.now() / 1000;
    $("login").hidden = !hasKey();
    tell("live");
  } catch (error) {
    if (error.status === 401) {
      $("login").hidden = false;
      tell("an API key is needed", true);
    } else {
      tell(answeredAt === null ? "no connection" : `no connection since ${clock(answeredAt)}`, true);
    }
  } finally {
    setTimeout(look, EVERY_MS);
  }
}

// What is shown while the router does not answer is the past, and looks like it.
function tell(text, bad = false) {
  const pill = $("connection");
  if (pill.textContent !== text) pill.textContent = text; // screen readers announce each change
  pill.classList.toggle("bad", bad);
  $("main").classList.toggle("past", bad);
}

function show(now) {
  if (seen.length && now.clock < seen.at(-1).clock) seen.length = 0; // another router process
  seen.push(now);
  while (now.clock - seen[0].clock > COMPLETED_OVER_S) seen.shift();
  $("model").textContent = now.model;
  $("registry").hidden = now.router.registry === "reachable";
  $("registry").textContent = `registry ${now.router.registry}`;
  showNumbers(now);
  showTotals(now);
  showPools(now);
  offerWorkers(now.workers);
  showOpen(now.requests);
  showErrors(now.errors);
  showList(Object.values(now.totals.outcomes).reduce((sum, one) => sum + one, 0));
  loadCurves();
  loadPlans();
}

function gained(name, overS) {
  const last = seen.at(-1);
  const first = seen.find((one) => last.clock - one.clock <= overS);
  return { more: Math.max(0, last.totals[name] - first.totals[name]), seconds: last.clock - first.clock };
}

function rate(name, overS = RATE_OVER_S) {
  const { more, seconds } = gained(name, overS);
  return seconds > 0 ? more / seconds : 0;
}

function showNumbers(now) {
  const { attainment, objectives } = now.slo;
  const judged = Object.keys(objectives).length > 0;
  const share = attainment === null ? "" : `, ${percent(attainment)} meet the SLO`;
  put("goodput", short(rate("met", COMPLETED_OVER_S)), judged ? `goodput/s${share}` : "requests/s completed");
  const meter = $("goodput").querySelector("meter");
  meter.hidden = attainment === null;
  if (attainment !== null) Object.assign(meter, { value: attainment, low: 0.9, high: 0.95, optimum: 1 });
  put("flight", `${now.router.inflight}`, `in flight now${now.router.queued ? `, ${now.router.queued} more queued` : ""}${now.router.degraded ? `, overload level ${now.router.degraded}` : ""}`);
  Object.assign($("alarm"), { hidden: !now.router.alarm, textContent: now.router.alarm });
  put("tokens", short(rate("output_tokens")), "output tokens/s");
  const [cached, prompt] = ["cached_tokens", "prompt_tokens"].map((name) => gained(name, COMPLETED_OVER_S).more);
  put("cached", prompt ? percent(cached / prompt) : "–", "prompt tokens cached, last minute");
  put("moved", bytes(rate("handoff_bytes")), "KV moved/s");
}

function put(id, value, caption) {
  $(id).querySelector("b").textContent = value;
  $(id).querySelector("span").textContent = caption;
}

function showTotals({ totals, routers }) {
  const ended = Object.entries(totals.outcomes).filter(([, number]) => number).map(([outcome, number]) => `${number} ${outcome}`).join(", ");
  const { cached_tokens: cached, prompt_tokens: prompt } = totals;
  $("totals").textContent = [
    `Since the ${routers.length > 1 ? "routers" : "router"} started: ${ended || "no request"}`,
    `${short(totals.output_tokens)} output tokens${totals.drafted_tokens ? `, ${short(totals.accepted_tokens)} of ${short(totals.drafted_tokens)} guesses right` : ""}`,
    ...(totals.drafted_tokens ? [`right at each place of a guess: ${places(totals)}`] : []),
    `${short(prompt)} prompt tokens${prompt ? `, ${percent(cached / prompt)} of them cached` : ""}`,
    `${count(totals.handoffs, "handoff")}, ${bytes(totals.handoff_bytes)} of KV`,
  ].join(" · ");
}

// The share of guesses that were right, at each place in the guess of a step.
function places({ drafted_at: drafted, accepted_at: right }) {
  return Object.entries(drafted).sort(([one], [other]) => one - other).map(([place, made]) => percent((right[place] ?? 0) / made)).join(", ") || "–";
}

// The cockpit's own process listens on loopback, so there is a link where this page is there, too.
const COCKPIT = { host: "127.0.0.1", port: "8475" };
if (/^(localhost|127\.[\d.]+|\[::1\])$/.test(location.hostname)) {
  $("cockpit_link").href = Object.assign(new URL("/", location.href), { protocol: "http:", hostname: COCKPIT.host, port: COCKPIT.port }).href;
  $("cockpit_place").hidden = false;
}
$("to_cockpit").addEventListener("click", (event) => {
  event.preventDefault();
  $("cockpit").showModal();
});

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
});
showPlayground();
look();
