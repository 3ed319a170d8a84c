// The charts of the run that is shown, and of those that are compared with it, over the seconds since their start. Drawn by uPlot; the
// values at a moment are read with the mouse or with the arrow keys.
/* global uPlot */
import { $, make, percent, short, time } from "./show.js";

const share = (value) => (value > 0 && value < 0.1 ? `${(100 * value).toFixed(1)} %` : percent(value));
const CHARTS = [
  { title: "Time to first token", of: "ttft_p50", also: "ttft_p95", format: time },
  { title: "Time per output token", of: "tpot_p50", also: "tpot_p95", format: time },
  { title: "Output tokens/s", of: "tokens", format: short },
  { title: "Queue", of: "queued", format: short },
  { title: "KV in use", of: "kv", format: share, most: 1 },
  { title: "Batch use", of: "batch", format: share, most: 1 },
];
const HEIGHT = 150;
export const COLOURS = ["prefill", "transfer", "decode", "bypass"]; // of the run that is shown, and of those compared
export const swatch = (i, also = false) => make("i", { class: `swatch ${also ? "dashed" : COLOURS[i]}`, ...(also ? { style: { color: `var(--${COLOURS[i]})` } } : {}) });

let plots = []; // one for each chart
let runs = []; // the run that is shown first

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `shown`: runs with their points; the first one has both percentiles.
export function drawCharts(shown) {
  const same = plots.length && shown.length === runs.length && shown.every((run, i) => run.id === runs[i].id);
  runs = shown;
  if (!same) build();
  const seconds = Math.max(10, ...runs.flatMap((run) => [run.duration_s, ...run.points.slice(-1).map((point) => Math.round(point.at))]));
  const x = Array.from({ length: seconds + 1 }, (_, i) => i);
  plots.forEach((plot, i) => {
    plot.setData([x, ...lines(CHARTS[i]).map(([run, name]) => values(run, name, seconds))]);
    tell(plot, CHARTS[i]);
  });
}

// The lines of a chart: run, name of the value, place of its colour, whether it is a second percentile.
function lines(chart) {
  return runs.flatMap((run, i) => [[run, chart.of, i, false], ...(chart.also && !i ? [[run, chart.also, i, true]] : [])]);
}

function values(run, name, seconds) {
  const row = new Array(seconds + 1).fill(null);
  for (const point of run.points) if (Math.round(point.at) <= seconds) row[Math.round(point.at)] = point[name];
  return row;
}

function build() {
  for (const plot of plots) plot.destroy();
  $("charts").replaceChildren();
  plots = CHARTS.map((chart) => {
    const place = make("div", { class: "plot", role: "img", tabindex: "0" });
    const figure = make("figure", { class: "chart" }, make("figcaption", {}, make("b", {}, chart.title), make("span", { class: "values" })), place);
    $("charts").append(figure);
    const plot = new uPlot(options(chart, figure), [[0], ...lines(chart).map(() => [null])], place);
    place.addEventListener("keydown", (event) => move(plot, event));
    place.addEventListener("blur", () => plot.setCursor({ left: -10, top: -10 }));
    return plot;
  });
}

function options(chart, figure) {
  const dim = { stroke: colour("--dim"), font: "10px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("--grid"), width: 1 } };
  return {
    width: width(figure), height: HEIGHT, legend: { show: false }, padding: [8, 16, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "cockpit" }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, chart.most ?? Math.max(1e-6, (high ?? 0) * 1.1)] } },
    axes: [
      { ...dim, size: 22, values: (_, ticks) => ticks.map((tick) => `${tick} s`) },
      { ...dim, size: 54, space: 34, values: (_, ticks) => ticks.map((tick) => chart.format(tick)) },
    ],
    series: [{}, ...lines(chart).map(([, , i, also]) => ({
      stroke: colour(`--${COLOURS[i]}`), width: i ? 1.4 : 2, spanGaps: true, points: { size: 4 }, ...(also ? { dash: [5, 4] } : {}),
    }))],
    hooks: { setCursor: [(plot) => tell(plot, chart)] },
  };
}

const width = (figure) => Math.max(200, figure.clientWidth - 20);

function move(plot, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!by) return;
  event.preventDefault();
  const last = plot.data[0].length - 1;
  const at = Math.min(last, Math.max(0, (plot.cursor.idx ?? last + (by < 0 ? 1 : 0)) + by));
  plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 10 });
}

// The values at the moment that is pointed at; otherwise the last ones.
function tell(plot, chart) {
  const figure = plot.root.closest("figure");
  const at = plot.cursor.idx;
  const pointed = at !== null && at !== undefined && plot.cursor.left >= 0;
  const told = lines(chart).map(([run, name, i, also], row) => {
    const found = pointed ? plot.data[row + 1]?.[at] : run.points.findLast((point) => point[name] !== null)?.[name];
    const text = found === null || found === undefined ? "–" : chart.format(found);
    return { text, swatch: swatch(i, also), name: `${runs.length > 1 ? `run ${run.id} ` : ""}${chart.also ? (also ? "P95" : "P50") : ""}`.trim() };
  });
  const spans = told.map((one) => make("span", {}, one.swatch, ` ${one.name} `, make("b", {}, one.text)));
  figure.querySelector(".values").replaceChildren(...(pointed ? [make("span", {}, `${plot.data[0][at]} s`)] : []), ...spans);
  const now = told.map((one) => `${one.name} ${one.text}`.trim()).join(", ");
  const highest = Math.max(0, ...runs.slice(0, 1).flatMap((run) => run.points.map((point) => point[chart.of] ?? 0)));
  plot.root.parentElement.setAttribute("aria-label", `${chart.title}, ${runs[0]?.label ?? "no run"}: ${now || "no value"}; highest ${chart.format(highest)}`);
}

new ResizeObserver(() => {
  for (const plot of plots) {
    const wide = width(plot.root.closest("figure"));
    if (wide !== plot.width) plot.setSize({ width: wide, height: HEIGHT });
  }
}).observe($("charts"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!plots.length) return;
  build();
  drawCharts(runs);
});
