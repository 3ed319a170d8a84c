// The tools of the playground, which run in the visitor's browser: those of `baton chat --tools`. What a model writes is never run as code.

const TOOLS = {
  calculate: { description: "Computes an arithmetic expression.", parameter: "expression", run: calculate },
  time: { description: "The date and the time, here or in an IANA time zone.", parameter: "zone", run: clock },
};

export const offered = Object.entries(TOOLS).map(([name, { description, parameter }]) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties: { [parameter]: { type: "string" } } } },
}));

// The result of a call. What goes wrong is a result, too: the model may try again.
export function run(name, text) {
  try {
    const { parameter, run } = TOOLS[name];
    return run(JSON.parse(text)[parameter]);
  } catch (error) {
    return `error: ${error.message}`;
  }
}

// sum := product (("+" | "-") product)*, product := factor (("*" | "/") factor)*, factor := "-" factor | "(" sum ")" | number
function calculate(expression) {
  if (expression.length > 500) throw new Error("more than 500 characters");
  const parts = expression.match(/\d+(\.\d*)?|\S/g) ?? [];
  const series = (signs, next) => {
    let value = next();
    while (signs.includes(parts[0])) {
      const [sign, other] = [parts.shift(), next()];
      value = sign === "+" ? value + other : sign === "-" ? value - other : sign === "*" ? value * other : value / other;
    }
    return value;
  };
  const sum = () => series(["+", "-"], () => series(["*", "/"], factor));
  const factor = () => {
    const part = parts.shift() ?? "";
    if (part === "-") return -factor();
    if (part === "(") {
      const value = sum();
      if (parts.shift() === ")") return value;
    } else if (/^\d/.test(part)) return Number(part);
    throw new Error("only numbers and + - * / and brackets are known");
  };
  const value = sum();
  if (parts.length || !Number.isFinite(value)) throw new Error(parts.length ? `not expected: ${parts[0]}` : "no finite number");
  return String(value);
}

function clock(zone) {
  return new Date().toLocaleString("sv-SE", zone ? { timeZone: zone } : {});
}
