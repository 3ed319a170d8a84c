"""docs/pictures/rooms.svg: `python scripts/rooms_picture.py` draws the rooms and who imports whom, `--check` only compares.

The arrows are the imports of the code, as the tests read them; only the places of the boxes are chosen here. An arrow that follows from
others (A uses B, B uses C, so A may use C) is left out.
"""

import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
# Files that import nothing of ours and that nearly anyone imports.
WORDS = {"baton.clock", "baton.moves", "baton.section", "baton.stages", "baton.terminal", "baton.engine.machine"}
# Files of `baton/engine` itself, which lie between its rooms, and the box of each.
DOORS = {"baton.engine.start": "engine.start", "baton.engine.options": "engine.options", "baton.engine.runner": "engine.runner"}
BUILD = "engine.build"
PITCH, ROW, WIDE, HIGH = 152, 72, 134, 46  # pixels
MARGIN, HEAD = 20, 34
FILL = {"use": "#e8f1fb", "router": "#fdeede", "worker": "#e6f4ea", "engine": "#f3ecf9", "ground": "#eeeeee"}
EDGE = {"use": "#2f6fb3", "router": "#c76a12", "worker": "#2e7d4f", "engine": "#7a4bb0", "ground": "#5f6368"}


@dataclass(frozen=True, slots=True)
class Box:
    """A room at a column and a row, with its colour and what it does, in a few words."""

    column: float
    row: float
    kind: str
    does: str

    @property
    def x(self) -> float:
        return MARGIN + self.column * PITCH

    @property
    def y(self) -> float:
        return MARGIN + HEAD + self.row * ROW


BOXES = {
    "baton.cli": Box(1, 0, "use", "the baton command"),
    "loadtest": Box(0, 3, "use", "load and verdicts"),
    "baton.access": Box(0, 4, "use", "reaching a cluster"),
    "baton": Box(2, 8.6, "use", "the client"),
    "baton.launch": Box(0, 5.2, "use", "keeping alive"),
    "baton.cockpit": Box(1, 1, "use", "experiments, a page"),
    "baton.predict": Box(1, 2, "use", "reports, simulated"),
    "baton.simulate": Box(2, 3, "router", "virtual time"),
    "router": Box(2, 4.4, "router", "doors, dispatch"),
    "prefill_worker": Box(3, 0, "worker", "prompts"),
    "decode_worker": Box(4, 0, "worker", "tokens"),
    "baton.worker": Box(3.5, 1, "worker", "what both share"),
    "kvtransfer": Box(3.3, 4.4, "worker", "leases, transports"),
    "baton.plan": Box(1, 4, "use", "sizes, formulae"),
    "baton.planner": Box(2.1, 1, "use", "sizes and roles, alone"),
    "baton.profile": Box(1, 5.6, "ground", "how long parts take"),
    "baton.tiers": Box(4, 5.6, "worker", "colder copies of KV"),
    "baton.models": Box(4, 2.2, "use", "tale, training, fetch"),
    "baton.recorder": Box(2.3, 5.8, "ground", "the flight recorder"),
    "baton.cluster": Box(2, 7.2, "ground", "config, records, rpc"),
    "engine.start": Box(5, 1, "engine", "an engine from options"),
    "baton.engine.vllm": Box(6, 2, "engine", "vLLM, same contract"),
    "engine.build": Box(5, 3, "engine", "and engine.choice"),
    "baton.engine.gpu": Box(6, 4, "engine", "CUDA kernels, graphs"),
    "engine.runner": Box(5, 5, "engine", "a model on a device"),
    "baton.engine.cpu": Box(6, 6, "engine", "compiled kernels"),
    "baton.engine.model": Box(5, 7, "engine", "families, plain torch"),
    "baton.engine.facts": Box(5, 8, "engine", "a folder's files"),
    "baton.engine.grammars": Box(6, 7, "engine", "masks of tokens"),
    "engine.options": Box(6, 9, "engine", "keys and defaults"),
    "baton.engine.core": Box(5, 10, "engine", "scheduler, blocks"),
}
LEGEND = {
    "use": "what people start or import",
    "router": "the router, also in virtual time",
    "worker": "a worker",
    "ground": "what a cluster shares",
    "engine": "the engine",
}
CAPTION = "An arrow leads from a room to one that it imports. Arrows that follow from others are left out."
FRAME = (5, 1, 6, 10)  # baton/engine: first column and row, last column and row


def imports() -> dict[str, set[str]]:
    """box → the boxes that its files import. Raises KeyError for a room that has no box."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # which the tests import from
    tests: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "test_repository.py"))
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in tests["sources"]() if path.name != "__init__.py"}
    graph: dict[str, set[str]] = tests["file_graph"]({".".join(parts): path.read_text() for path, parts in names.items()})
    rooms = {".".join(parts): tests["room_of"](path) for path, parts in names.items()}

    def box(module: str) -> str:
        return DOORS.get(module, BUILD if rooms[module] == "baton.engine" else rooms[module])

    found: dict[str, set[str]] = {name: set() for name in BOXES}
    for module in graph.keys() - WORDS:
        found[box(module)] |= {box(other) for other in graph[module] - WORDS} - {box(module)}
    return found


def reduced(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The graph without the edges that follow from longer ways. It must have no circle."""

    def beyond(name: str) -> set[str]:
        return graph[name].union(*(beyond(other) for other in graph[name]))

    return {name: sorted(others - set().union(*(beyond(other) for other in others))) for name, others in graph.items()}


def arrow(start: Box, end: Box) -> str:
    """An arrow from the bottom of one box to the top of another, or upwards; into the left side of one within the frame, or in the same
    row."""
    if end.kind == "engine" != start.kind:
        x1, y1 = (start.x + WIDE, start.y + HIGH / 2) if start.row == end.row else (start.x + WIDE * 0.7, start.y + HIGH)
        x2, y2 = end.x - 2, end.y + HIGH / 2
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + (y2 - y1) * 0.8:g} {(x1 + x2) / 2:g} {y2:g} {x2:g} {y2:g}"
    else:
        lean = max(-1.0, min(1.0, (end.column - start.column) / 2)) * WIDE * 0.3
        x1, y1, x2, y2 = start.x + WIDE / 2 + lean, start.y + HIGH, end.x + WIDE / 2 - lean, end.y - 2
        bend = max(24.0, (y2 - y1) * 0.55)
        if end.row < start.row:
            y1, y2 = start.y, end.y + HIGH + 2
            bend = min(-24.0, (y2 - y1) * 0.55)
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    return f'<path d="{path}" stroke="{EDGE[start.kind]}" marker-end="url(#{start.kind})"/>'


def drawn(name: str, box: Box) -> Iterator[str]:
    shown = name.removeprefix("baton.engine.").removeprefix("engine.") if box.kind == "engine" else name.replace(".", "/")
    middle = box.x + WIDE / 2
    yield f'<rect x="{box.x:g}" y="{box.y:g}" width="{WIDE}" height="{HIGH}" rx="7" fill="{FILL[box.kind]}" stroke="{EDGE[box.kind]}"/>'
    yield f'<text x="{middle:g}" y="{box.y + 19:g}" class="room">{escape(shown)}</text>'
    yield f'<text x="{middle:g}" y="{box.y + 36:g}" class="does">{escape(box.does)}</text>'


def lines(graph: Mapping[str, list[str]]) -> Iterator[str]:
    width = 2 * MARGIN + 6 * PITCH + WIDE
    height = MARGIN + HEAD + FRAME[3] * ROW + HIGH + 10 + MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    yield ' font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
    yield "<title>The rooms of Baton; an arrow leads from a room to one that it imports</title>"
    yield "<style>.room{font-size:13px;font-weight:600;fill:#1f2328;text-anchor:middle}"
    yield ".does{font-size:11px;fill:#57606a;text-anchor:middle}.told{font-size:12px;fill:#57606a}</style>"
    yield "<defs>"
    for kind, colour in EDGE.items():
        yield f'<marker id="{kind}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        yield f'<path d="M0 0.5 L7.5 4 L0 7.5 z" fill="{colour}"/></marker>'
    yield "</defs>"
    yield f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    first, last = Box(*FRAME[:2], "engine", ""), Box(*FRAME[2:], "engine", "")
    yield f'<rect x="{first.x - 10}" y="{first.y - 30}" width="{last.x - first.x + WIDE + 20}" height="{last.y - first.y + HIGH + 40}"'
    yield f' rx="10" fill="#fbf9fd" stroke="{EDGE["engine"]}" stroke-dasharray="4 4"/>'
    yield f'<text x="{first.x}" y="{first.y - 12}" font-size="13" font-weight="600" fill="{EDGE["engine"]}">baton/engine</text>'
    yield '<g fill="none" stroke-width="1.6" stroke-opacity="0.85">'
    yield from (arrow(BOXES[name], BOXES[other]) for name, others in graph.items() for other in others)
    yield "</g>"
    for name, box in BOXES.items():
        yield from drawn(name, box)
    for place, (kind, told) in enumerate(LEGEND.items()):
        y = MARGIN + HEAD + 8.2 * ROW + place * 24
        yield f'<rect x="{MARGIN}" y="{y:g}" width="26" height="15" rx="4" fill="{FILL[kind]}" stroke="{EDGE[kind]}"/>'
        yield f'<text x="{MARGIN + 36}" y="{y + 12:g}" class="told">{escape(told)}</text>'
    yield f'<text x="{MARGIN}" y="{MARGIN + 12}" class="told">{escape(CAPTION)}</text>'
    yield "</svg>"


def main() -> None:
    text = "\n".join(lines(reduced(imports()))) + "\n"
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(text)
    elif not PICTURE.is_file() or PICTURE.read_text() != text:
        sys.exit(f"{PICTURE.name} is out of date with the imports; run `python scripts/rooms_picture.py`")


if __name__ == "__main__":
    main()
