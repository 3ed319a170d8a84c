// Asks for the state every few seconds, and for the points of a run while it goes on.
import { clear, field, refuse, send } from "./asking.js";
import { showCalculators } from "./calculators.js";
import { drawCharts } from "./charts.js";
import { MOST_SHOWN, breaks, showRuns } from "./runs.js";
import { $, get, hasKey, make, short, time, useKey } from "./show.js";

const IDLE_MS = 4000;
const RUNNING_MS = 700;

let state = null; // as last told
let chosen = null; // name of an experiment
let where = "simulated";
const given = new Map(); // "experiment where" → name of a knob → value
const points = new Map(); // number of a run → its points
let shown = []; // numbers of the runs in the charts, the main one first
let timer = 0;

async function look() {
  clearTimeout(timer);
  try {
    state = await get("state");
    $("login").hidden = !hasKey();
    tell(state.cluster.gone ? "simulator alone" : "live", Boolean(state.cluster.gone));
    if (chosen === null) choose(state.experiments[0].name);
    await follow();
    show();
  } catch (error) {
    if (error.status === 401) $("login").hidden = false;
    tell(error.status === 401 ? "an API key is needed" : "no connection", true);
  } finally {
    timer = setTimeout(look, state?.running ? RUNNING_MS : IDLE_MS);
  }
}

function tell(text, bad) {
  if ($("connection").textContent !== text) $("connection").textContent = text;
  $("connection").classList.toggle("bad", bad);
}

// The points that came, of each run that is drawn.
async function follow() {
  shown = shown.filter((number) => state.runs.some((run) => run.id === number));
  for (const number of shown) {
    const run = state.runs.find((one) => one.id === number);
    const known = points.get(number) ?? [];
    if (known.length < run.made) {
      const told = await get(`runs/${number}?since=${known.length}`);
      if (told) points.set(number, [...known, ...told.points]);
    }
  }
}

function show() {
  const { cluster } = state;
  $("model").textContent = cluster.gone ? "" : `${cluster.model}: ${cluster.prefill} prefill, ${cluster.decode} decode`;
  $("live_link").hidden = !cluster.page;
  if (cluster.page) $("live_link").href = `${location.protocol}${"/".repeat(2)}${cluster.page}/`;
  showExperiments();
  showWhere();
  showCalculators(state.calculators);
  showRuns(state.runs, shown, state.knobs, { show: open, compare, forget });
  showRun();
}

// What is chosen

function showExperiments() {
  if (!$("experiments").children.length) {
    $("experiments").append(...state.experiments.map((one) => {
      const button = make("button", { type: "button", "data-name": one.name }, one.title);
      button.addEventListener("click", () => choose(one.name));
      return make("li", {}, button);
    }));
  }
  for (const button of $("experiments").querySelectorAll("button")) {
    if (button.dataset.name === chosen) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

const experiment = () => state.experiments.find((one) => one.name === chosen);

function choose(name) {
  chosen = name;
  const one = experiment();
  $("title").textContent = one.title;
  $("says").textContent = one.says;
  $("look").textContent = one.look[0].toLowerCase() + one.look.slice(1);
  where = one.knobs.real.length && !state.cluster.gone ? "real" : "simulated";
  showExperiments();
  showKnobs();
}

const START = { real: "Start on the real cluster", own: "Start on a cluster of its own", simulated: "Start in the simulator" };

// Where the chosen experiment can run now; a place that is gone is not chosen any more.
function showWhere() {
  const one = experiment();
  const why = one.knobs.real.length ? state.cluster.gone : one.instead;
  if (why && where === "real") {
    where = "simulated";
    showKnobs();
  }
  $("on_real").disabled = Boolean(why);
  $("on_own").parentElement.hidden = !one.knobs.own.length;
  $(`on_${where}`).checked = true;
  $("instead").textContent = why ? `Not on the real cluster: ${why}.` : "";
  $("instead").hidden = !why;
  $("own_note").textContent = `Of its own: real processes, started on this machine's CPU for the run and taken down after it; at most ${state.own_most.decode} workers of one thread. The running cluster stays as it is.`;
  $("own_note").hidden = where !== "own";
  $("start").textContent = START[where];
  $("start").disabled = state.running !== null;
  $("stop").disabled = state.running === null;
}

function values() {
  const key = `${chosen} ${where}`;
  if (!given.has(key)) given.set(key, Object.fromEntries(experiment().knobs[where].map((name) => [name, experiment().defaults[where][name]])));
  return given.get(key);
}

function showKnobs() {
  const now = values();
  $("knobs").replaceChildren(...Object.entries(now).map(([name, value]) => {
    const knob = state.knobs[name];
    const most = { real: knob.real_most, own: state.own_most[name] ?? knob.real_most }[where] ?? knob.most;
    return field("knob", name, { ...knob, most }, value, "range");
  }));
  for (const name of Object.keys(now)) tellKnob(name);
  if ($("knob_by") && !state.profile) $("knob_by").querySelector('[value="profile"]').disabled = true;
  clear("knob", "refused");
  showWhere();
}

function tellKnob(name) {
  const [input, knob, value] = [$(`knob_${name}`), state.knobs[name], values()[name]];
  if (knob.options) return;
  const text = `${Number(value).toLocaleString("en")}${knob.unit ? ` ${knob.unit}` : ""}`;
  $(`knob_${name}_out`).textContent = text;
  input.setAttribute("aria-valuetext", text);
}

$("knobs").addEventListener("input", (event) => {
  const { name } = event.target;
  values()[name] = state.knobs[name].options ? event.target.value : Number(event.target.value);
  tellKnob(name);
  clear("knob", "refused");
});
for (const radio of document.querySelectorAll('[name="where"]')) {
  radio.addEventListener("change", () => {
    where = radio.value;
    showKnobs();
  });
}

// A run

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  clear("knob", "refused");
  $("start").disabled = true;
  try {
    const run = await send("start", { experiment: chosen, where, settings: values() });
    shown = [run.id, ...shown.filter((number) => number !== run.id)].slice(0, 1);
    $("stop").disabled = false;
  } catch (error) {
    refuse("knob", "refused", error);
  }
  await look();
});
$("stop").addEventListener("click", () => change("stop", {}));

async function change(path, body) {
  try {
    await send(path, body);
  } catch (error) {
    refuse("knob", "refused", error);
  }
  await look();
}

function open(number) {
  shown = [number, ...shown.slice(1).filter((other) => other !== number)];
  look();
}

function compare(number) {
  shown = shown.includes(number) ? shown.filter((other) => other !== number) : [...shown, number].slice(0, MOST_SHOWN);
  look();
}

const forget = (number) => change("forget", { id: number });

function showRun() {
  const runs = shown.map((number) => ({ ...state.runs.find((run) => run.id === number), points: points.get(number) ?? [] }));
  const [run] = runs;
  drawCharts(runs);
  $("label").hidden = !run;
  $("progress").hidden = !run || run.state !== "running";
  $("doubts").hidden = !run?.doubts.length;
  if (!run) {
    $("shown").textContent = "No run yet";
    say("");
    return;
  }
  $("shown").textContent = `Run ${run.id}: ${run.title}${runs.length > 1 ? `, with ${runs.slice(1).map((other) => `${other.id} (${other.label})`).join(", ")}` : ""}`;
  $("label").textContent = run.label;
  $("label").className = `pill ${run.where}`;
  $("doubts").textContent = run.doubts.length ? `${run.where === "simulated" ? "Outside of what was validated" : "Note"}: ${run.doubts.join("; ")}.` : "";
  const at = run.points.at(-1)?.at ?? 0;
  $("progress").value = Math.min(1, at / run.duration_s);
  say(run.state === "running" ? run.doing || "running" : `${run.state}${run.message ? `: ${run.message}` : ""}${summary(run.figures)}`);
}

// Screen readers announce each change: the beginning and the end of a run.
function say(text) {
  if ($("said").textContent !== text) $("said").textContent = text;
}

function summary(told) {
  if (!told.requests) return "";
  const broken = told.breaks ? `, breaking point ${breaks(told.breaks)}` : "";
  return `: ${told.completed} of ${told.requests} requests ended ok, TTFT P50 ${time(told.ttft_p50)}, per token P50 ${time(told.tpot_p50)}, ${short(told.tokens_per_s)} tokens/s${broken}`;
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  look();
});
look();
