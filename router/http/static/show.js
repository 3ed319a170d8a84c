// What all parts of the page need: elements, requests to the router, numbers for people. Text from others is inserted as text only, never as
// HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Requests to the router

let key = "";

export const useKey = (given) => (key = given);
export const hasKey = () => key !== "";
export const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// Returns null for what is not there. Throws an error whose `status` is that of any other refusal.
export async function get(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(5000) });
  if (response.status === 404) return null;
  if (!response.ok) throw Object.assign(new Error(`status ${response.status}`), { status: response.status });
  return response.json();
}

// Numbers

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(value < 10 ? 2 : 1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < 4) [value, unit] = [value / 1024, unit + 1];
  return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(seconds ? 1 : 0)} ms`;
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(0)} %`;
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
export const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hourCycle: "h23" });
export const date = (at) => new Date(1000 * at).toLocaleString([], { dateStyle: "full", timeStyle: "long" });

// A bypass is its own kind of work, although its time counts as prefill.
export const kind = (lap) => (lap.bypass ? "bypass" : lap.stage);

// `longest`: the time that the whole width stands for.
export function bar(record, longest) {
  const share = (seconds) => `${(100 * Math.max(0, seconds)) / (longest || 1e-9)}%`;
  return make("div", { class: "bar" }, ...record.laps.map((lap) => make("i", {
    class: kind(lap), title: `${kind(lap)} ${lap.worker} ${time(lap.end - lap.start)}`, style: { width: share(lap.end - lap.start) },
  })));
}
