// What planners have decided lately, newest first: what they saw, what else could be done, what they expected, and what came of it.
import { $, clock, date, get, make, percent, short, time } from "./show.js";

const EVERY_MS = 2000;
const AWAY = "The registry does not answer, so it is not known what planners decide.";
const NOBODY = "No planner runs: the pools have the sizes and workers the roles that people give them.";

let due = 0; // when to ask again
let shown = ""; // the answer

export async function loadPlans() {
  if (Date.now() < due) return;
  due = Date.now() + EVERY_MS;
  try {
    const told = await get("plans");
    if (JSON.stringify(told) !== shown) show(told);
    shown = JSON.stringify(told);
  } catch {
    // that there is no connection is said elsewhere
  }
}

function show({ registry, planner, decisions }) {
  const said = registry === "away" ? AWAY : planner ? leads(planner) : NOBODY;
  if ($("plans_note").textContent !== said) $("plans_note").textContent = said; // screen readers announce each change
  if (registry === "away") return; // what was decided before stays
  const list = $("plans");
  const known = new Map([...list.children].map((element) => [element.dataset.at, element]));
  const wanted = decisions.map((one) => fill(known.get(`${one.at}`) ?? decision(one), one));
  for (const element of [...list.children]) if (!wanted.includes(element)) element.remove();
  wanted.forEach((element, place) => list.children[place] !== element && list.insertBefore(element, list.children[place] ?? null));
}

const leads = ({ leader, dry_run: dry }) => (dry ? "A planner explains what it would do, and changes nothing (dry run)." : `${leader} leads.`);

// One that is open, or has the focus, stays so when what came of it is known.
function decision({ at }) {
  return make("details", { "data-at": `${at}` }, make("summary"), make("div"));
}

function fill(element, one) {
  const [summary, body] = element.children;
  const what = `${one.dry && one.action ? "would do: " : ""}${one.action || "no change"}`;
  summary.replaceChildren(make("time", { title: date(one.at) }, clock(one.at)), " ", make("b", {}, what), ` ${one.why} `, pill(one));
  body.replaceChildren(facts(one), alternatives(one.alternatives));
  return element;
}

function pill({ action, dry, outcome }) {
  if (!action || dry) return "";
  const missed = outcome && (outcome.state !== "settled" || (outcome.attainment !== null && outcome.attainment < outcome.expected - 0.05));
  return make("span", { class: `pill${missed ? " bad" : ""}` }, outcome ? outcome.state : "under way");
}

function facts(one) {
  const told = [
    ["workers", one.serving === one.after ? one.serving : `${one.serving} → ${one.after}`],
    ["load", load(one.demand)],
    ["forecast", forecast(one.forecast)],
    ["expected", one.expected && `${effect(one.expected)}${one.now && one.action ? `; as it is ${effect(one.now)}` : ""}`],
    ["what came", came(one)],
  ];
  return make("dl", {}, ...told.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

const load = ({ rate, prompt, uncached, output }) => rate ? `${short(rate)} requests/s of ${short(prompt)} tokens, of which ${short(uncached)} are computed, and ${short(output)} of output` : "none";

function forecast({ rate, by, errors }) {
  const scored = Object.entries(errors).map(([name, error]) => `${name} ${short(error)}`).join(", ");
  return by && `${short(rate)} requests/s by “${by}”${scored ? `; mean errors so far: ${scored}` : ""}`;
}

const effect = ({ attainment, prefill_use: prefill, decode_use: decode }) => `${percent(attainment)} meet the objectives, prefill ${percent(prefill)} busy, decode ${percent(decode)}`;

function came({ action, dry, outcome }) {
  if (!action || dry) return "";
  if (!outcome) return "it is under way, or its planner died before it could tell";
  const { state, seconds, why, attainment, expected } = outcome;
  const met = attainment === null ? "no request ended since" : `${percent(attainment)} met the objectives`;
  const hoped = expected === null ? "" : `, ${percent(expected)} were expected`;
  return `${state} after ${time(seconds)}${why ? `: ${why}` : ""}${state === "settled" ? `; ${met}${hoped}` : ""}`;
}

function alternatives(all) {
  if (all.length < 2) return "";
  const head = ["sizes", "in time", "prefill busy", "decode busy", "verdict"];
  const rows = all.map(({ sizes, verdict, effect: { attainment, prefill_use: prefill, decode_use: decode } }) =>
    make("tr", {}, make("th", { scope: "row" }, sizes), ...[attainment, prefill, decode].map((share) => make("td", {}, percent(share))), make("td", {}, verdict)));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
}
