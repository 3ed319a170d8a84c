// Requests that change something, and refusals shown at the field that they name.
import { $, headers, make } from "./show.js";

// Throws an error with `status`, `param` and the words of the refusal.
export async function send(path, body, method = "POST") {
  const options = { method, headers: { ...headers(), ...(method === "POST" ? { "content-type": "application/json" } : {}) }, signal: AbortSignal.timeout(15000) };
  const response = await fetch(path, method === "POST" ? { ...options, body: JSON.stringify(body) } : options);
  const told = await response.json();
  if (!response.ok) throw Object.assign(new Error(told.error.message), { status: response.status, param: told.error.param });
  return told;
}

// A number with a slider or a box, or one of a few words. `id` begins the ids of what is made.
export function field(id, name, knob, value, kind) {
  const own = `${id}_${name}`;
  const usual = { id: own, name, "aria-describedby": `${own}_why` };
  const input = knob.options
    ? make("select", usual, ...Object.entries(knob.options).map(([word, text]) => make("option", { value: word, ...(String(value) === word ? { selected: "" } : {}) }, text)))
    : make("input", { ...usual, type: kind, min: knob.least, max: knob.most, step: knob.step, value });
  const out = kind === "range" && !knob.options ? [make("output", { for: own, id: `${own}_out` })] : [];
  const unit = !out.length && knob.unit ? `, ${knob.unit}` : "";
  return make("div", { class: "knob" }, make("label", { for: own }, `${knob.label}${unit}`), ...out, input, make("span", { class: "why", id: `${own}_why` }));
}

// Shows a refusal: at the field that it names, if there is one, and in `place`.
export function refuse(id, place, error) {
  clear(id, place);
  const named = error.param && $(`${id}_${error.param}`);
  if (named) {
    named.setAttribute("aria-invalid", "true");
    $(`${named.id}_why`).textContent = error.message.replace(`${error.param}: `, "");
  }
  Object.assign($(place), { textContent: error.message, hidden: false });
}

export function clear(id, place) {
  for (const one of document.querySelectorAll(`[id^="${id}_"][aria-invalid]`)) {
    one.removeAttribute("aria-invalid");
    $(`${one.id}_why`).textContent = "";
  }
  $(place).hidden = true;
}
