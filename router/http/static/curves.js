// The last quarter of an hour: a small chart for each question. All have one axis of time, and show the values at the moment that is pointed
// at, with the mouse or with the arrow keys.
import { $, clock, draw, get, make, percent, short, time } from "./show.js";

const CHARTS = [
  { title: "Requests/s", format: short, series: [["ok", "completed", "decode"], ["errors", "failed or refused", "bad"]] },
  { title: "Goodput", format: short, series: [["goodput", "in time/s", "decode"]] },
  { title: "Output tokens/s", format: short, series: [["tokens", "tokens/s", "prefill"]] },
  { title: "In flight", format: short, series: [["running", "served", "prefill"], ["queued", "queued", "queue"]] },
  { title: "Time to first token", format: time, series: [["ttft_p50", "P50", "prefill"], ["ttft_p95", "P95", "transfer"]] },
  { title: "Time per output token", format: time, series: [["tpot_p50", "P50", "prefill"], ["tpot_p95", "P95", "transfer"]] },
  { title: "Inter-token latency", format: time, series: [["itl_p50", "P50", "prefill"], ["itl_p95", "P95", "transfer"]] },
  { title: "KV of the decode pool in use", format: percent, most: 1, series: [["kv", "in use", "bypass"]] },
];
const EVERY_MS = 5000;
const RETRY_MS = 1000;
const LEAST = 24; // points that the axis has room for, at least: two minutes
const HEIGHT = 96;
const LEFT = 50; // for the numbers of the axis
const FOOT = 16; // for the times of day
const HEAD = 6;

let points = [];
let step = 5;
let kept = 180;
let room = LEAST; // points on the axis: it grows with them
let pointedAt = null; // number of a point
let due = 0; // when to ask again
let empty = 0; // answers without a point

// Asks again when a new point can be there. The last two points are asked for once more: another router may have answered late.
export async function loadCurves() {
  if (Date.now() < due) return;
  due = Date.now() + EVERY_MS;
  try {
    const told = await get(`curves?since=${points.length > 1 && empty < 3 ? points.at(-2).number : 0}`);
    ({ step, kept } = told);
    empty = told.points.length ? 0 : empty + 1;
    if (told.points.length) {
      points = [...points.filter((point) => point.number < told.points[0].number), ...told.points];
      points = points.filter((point) => point.number > points.at(-1).number - kept);
    }
    redraw();
  } catch {
    due = Date.now() + RETRY_MS; // that there is no connection is said elsewhere
  }
}

function figures() {
  const place = $("curves");
  if (!place.children.length) {
    for (const chart of CHARTS) {
      const svg = draw("svg", { role: "img", tabindex: "0", height: HEIGHT });
      svg.addEventListener("pointermove", (event) => point(event, svg));
      svg.addEventListener("pointerleave", () => pointTo(null));
      svg.addEventListener("blur", () => pointTo(null));
      svg.addEventListener("keydown", move);
      place.append(make("figure", { class: "chart" }, make("figcaption", {}, make("b", {}, chart.title), make("span", { class: "values" })), svg));
    }
    new ResizeObserver(redraw).observe(place);
  }
  return [...place.children];
}

function redraw() {
  room = points.length ? Math.min(kept, Math.max(LEAST, points.at(-1).number - points[0].number + 1)) : LEAST;
  $("span").textContent = room === kept || !points.length ? `Last ${(kept * step) / 60} minutes` : `Since ${clock((points[0].number) * step)}, at most the last ${(kept * step) / 60} minutes`;
  figures().forEach((figure, i) => drawChart(figure, CHARTS[i]));
}

function point(event, svg) {
  const box = svg.getBoundingClientRect();
  const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
  pointTo(points.length ? Math.round(points.at(-1).number - (1 - share) * room) : null);
}

function move(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !points.length) return;
  event.preventDefault();
  pointTo((pointedAt ?? points.at(-1).number + 1) + by);
}

function pointTo(number) {
  const inside = number === null || !points.length ? null : Math.min(points.at(-1).number, Math.max(points[0].number, number));
  if (inside === pointedAt) return;
  pointedAt = inside;
  redraw();
}

function drawChart(figure, chart) {
  const svg = figure.querySelector("svg");
  const width = Math.max(160, figure.clientWidth - 20);
  svg.setAttribute("width", width);
  const last = points.at(-1)?.number ?? 0;
  const highest = Math.max(...chart.series.flatMap(([name]) => points.map((one) => one[name] ?? 0)), 0);
  const most = chart.most ?? nice(highest);
  const x = (number) => LEFT + (width - LEFT - 2) * (1 - (last - number) / room);
  const y = (value) => HEAD + (HEIGHT - FOOT - HEAD) * (1 - value / most);
  const marks = [...axis(chart, most, y, width), ...times(x)];
  if (pointedAt !== null) marks.push(draw("path", { class: "pointed", d: `M${x(pointedAt)} ${HEAD} V${HEIGHT - FOOT}` }));
  svg.replaceChildren(...marks, ...chart.series.map(([name, , colour], i) => draw("path", { class: `line ${colour}`, d: line(name, x, y), "data-series": name, ...(i ? { "data-second": "" } : {}) })));
  tell(figure, chart, highest);
}

// A line has a gap where there is no value; a value between two gaps is a dot.
function line(name, x, y) {
  let path = "";
  let before = null;
  for (const one of points) {
    const value = one[name];
    if (value === null) before = null;
    else {
      path += before === one.number - 1 ? `L${x(one.number).toFixed(1)} ${y(value).toFixed(1)}` : `M${x(one.number).toFixed(1)} ${y(value).toFixed(1)}h0.01`;
      before = one.number;
    }
  }
  return path;
}

function axis(chart, most, y, width) {
  return [0, most / 2, most].flatMap((value) => [
    draw("path", { class: "grid", d: `M${LEFT} ${y(value)} H${width}` }),
    draw("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, chart.format(value)),
  ]);
}

function times(x) {
  if (!points.length) return [draw("text", { x: LEFT + 8, y: HEIGHT / 2 }, "the first point comes after five seconds")];
  const end = points.at(-1).number;
  // The last of them may end where the chart does: then it reaches over to the one before it by half of its width.
  const fits = (seconds) => x(seconds / step) - x(0) >= (seconds < 60 ? 80 : 52);
  const every = [30, 60, 120, 300].find((seconds) => fits(seconds) || seconds === 300) / step;
  const marks = [];
  for (let number = Math.floor(end / every) * every; number > end - room; number -= every) {
    const near = x(number) > x(end) - 24 ? "end" : "middle";
    marks.push(draw("text", { x: x(number), y: HEIGHT - 3, "text-anchor": near }, clock(number * step).slice(0, every * step < 60 ? 8 : 5)));
  }
  return marks;
}

// The values at the moment that is pointed at; otherwise the last ones.
function tell(figure, chart, highest) {
  const shown = points.find((one) => one.number === pointedAt) ?? points.at(-1);
  const values = chart.series.map(([name, title, colour], i) => {
    const value = shown?.[name];
    const swatch = make("i", { class: colour, ...(i ? { "data-second": "" } : {}) });
    return make("span", {}, swatch, ` ${title} `, make("b", {}, value === null || value === undefined ? "–" : chart.format(value)));
  });
  if (pointedAt !== null && shown) values.unshift(make("span", {}, clock(shown.at)));
  figure.querySelector(".values").replaceChildren(...values);
  const now = chart.series.map(([name, title]) => `${title} ${points.length && points.at(-1)[name] !== null ? chart.format(points.at(-1)[name]) : "none"}`);
  figure.querySelector("svg").setAttribute("aria-label", `${chart.title}, last 15 minutes: now ${now.join(", ")}; highest ${chart.format(highest)}`);
}

// The lowest round number that is not below.
function nice(value) {
  if (value <= 0) return 1;
  const tens = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((digit) => digit * tens).find((one) => one >= value * 0.999);
}
