// The calculators: asked again at each change.
import { clear, field, refuse, send } from "./asking.js";
import { $, make } from "./show.js";

let latest = 0;

export function showCalculators(fields) {
  if ($("size").children.length) return;
  $("size").append(...fields.map((one) => field("size", one.name, one, one.value, "number")));
  $("size").addEventListener("input", ask);
  $("size").addEventListener("submit", (event) => event.preventDefault());
  ask();
}

async function ask() {
  const question = ++latest;
  const query = new URLSearchParams([...new FormData($("size"))]);
  try {
    const told = await send(`size?${query}`, null, "GET");
    if (question !== latest) return;
    clear("size", "size_refused");
    $("figures").tBodies[0].replaceChildren(...told.figures.map((one) =>
      make("tr", {}, make("th", { scope: "row" }, one.name), make("td", {}, one.shown), make("td", {}, one.formula))));
    $("from").textContent = told.from;
  } catch (error) {
    if (question !== latest) return;
    refuse("size", "size_refused", error);
    $("figures").tBodies[0].replaceChildren();
  }
}
