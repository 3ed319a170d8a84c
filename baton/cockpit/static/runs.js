// The table of the runs that are kept.
import { COLOURS, swatch } from "./charts.js";
import { $, make, percent, short, time } from "./show.js";

// `shown`: numbers of the runs whose charts are drawn, the main one first. `act`: what buttons do.
export function showRuns(runs, shown, knobs, act) {
  const body = $("runs").tBodies[0];
  const held = body.contains(document.activeElement) ? document.activeElement.dataset.at : null;
  const rows = [...runs].reverse().map((run) => row(run, shown.indexOf(run.id), knobs, act));
  body.replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: "11", class: "note" }, "none yet"))]));
  if (held) body.querySelector(`[data-at="${held}"]`)?.focus();
}

function row(run, place, knobs, act) {
  const { figures: told } = run;
  const button = (name, text, attributes, then) => {
    const made = make("button", { type: "button", "data-at": `${name} ${run.id}`, ...attributes }, text);
    made.addEventListener("click", then);
    return made;
  };
  const two = (name) => (told.requests ? `${time(told[`${name}_p50`])}, ${time(told[`${name}_p95`])}` : "");
  const full = place < 0 ? {} : { "aria-pressed": "true" };
  const cells = [
    make("th", { scope: "row" }, `${run.id} ${run.title}`, make("span", { class: "state" }, run.state === "done" ? "" : ` ${run.state}${run.message && run.state === "failed" ? `: ${run.message}` : ""}`)),
    make("td", { class: "charts" }, place < 0 ? make("i", { class: "swatch" }) : swatch(place),
      button("show", "show", { ...(place === 0 ? full : {}), "aria-label": `Show run ${run.id}` }, () => act.show(run.id)),
      button("compare", "compare", { ...(place > 0 ? full : {}), "aria-label": `Compare run ${run.id}`, ...(place === 0 ? { disabled: "" } : {}) }, () => act.compare(run.id)),
      ...(run.state === "running" ? [] : [button("forget", "✕", { title: "forget", "aria-label": `Forget run ${run.id}` }, () => act.forget(run.id))])),
    make("td", {}, make("span", { class: `pill ${run.where}` }, run.label)),
    make("td", {}, told.requests === undefined ? "" : `${told.completed} of ${told.requests}`, failures(told)),
    make("td", {}, two("ttft")),
    make("td", {}, two("tpot")),
    make("td", {}, told.requests ? short(told.tokens_per_s) : ""),
    make("td", {}, told.requests ? `${short(told.goodput)}/s` : ""),
    make("td", {}, told.cached === null || told.cached === undefined ? "" : percent(told.cached)),
    make("td", {}, breaks(told.breaks)),
    make("td", { class: "settings" }, settings(run, knobs)),
  ];
  return make("tr", run.state === "failed" ? { class: "failed" } : {}, ...cells);
}

function failures(told) {
  const bad = Object.entries(told.outcomes ?? {}).filter(([name]) => name !== "ok").map(([name, count]) => `${count} ${name}`);
  return bad.length ? make("span", { class: "state" }, ` (${bad.join(", ")})`) : "";
}

export function breaks(found) {
  if (!found) return "";
  if (found.broke === null) return `not up to ${short(found.held ?? 0)}/s`;
  return found.held === null ? `below ${short(found.broke)}/s` : `${short(found.held)} to ${short(found.broke)}/s`;
}

function settings(run, knobs) {
  const said = Object.entries(run.settings).map(([name, value]) => {
    const knob = knobs[name];
    return `${knob.label.toLowerCase()} ${knob.options ? value : `${value}${knob.unit ? ` ${knob.unit}` : ""}`}`;
  });
  const there = run.facts.model && run.where !== "simulated" ? [`${run.facts.model}, ${run.facts.prefill} prefill, ${run.facts.decode} decode`] : [];
  return [...there, ...said].join(" · ");
}

export const MOST_SHOWN = COLOURS.length;
