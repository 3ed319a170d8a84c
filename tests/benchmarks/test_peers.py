"""The arithmetic and the table of the peers benchmark, and how its processes end. No engine runs here."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread
from peers.cells import CONTEXT, Cell, Model, Room, decode, mixed, prefill, room, same_tokens
from peers.engines import ENGINES, NUMERIC_TYPES, OURS, REFERENCE, Engine
from peers.process import Driver, DriverError
from peers.report import Ceilings, Samples, Spread, best_peer, picture, ratio, roof, summary, table

MODEL = Model("tiny", hidden=8, layers=2, heads=2, kv_heads=1, vocab=32, inner=24, context=64)
CEILINGS = Ceilings(
    {
        "read GB/s, 2 threads": Spread(10.0, 0.0),
        "float32 matmul GFLOP/s": Spread(100.0, 0.0),
        "bfloat16 matmul GFLOP/s": Spread(200.0, 0.0),
    },
    threads=2,
)


# Cells


def test_prefill_counts_prompt_tokens_until_the_last_first_token() -> None:
    assert prefill(512).tokens_per_s([[0.25]]) == 2048


def test_decode_counts_only_while_every_request_decodes() -> None:
    cell = Cell("two", "decode", ((4, 4), (4, 4)))
    early, late = [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]
    assert cell.tokens_per_s([early, late]) == 4 / 2, "after 2.0 and up to 4.0: two tokens of each request in two seconds"


def test_requests_that_never_decode_together_have_no_decode_rate() -> None:
    with pytest.raises(ValueError, match="before another had its first"):
        Cell("apart", "decode", ((4, 2), (4, 2))).tokens_per_s([[1.0, 2.0], [3.0, 4.0]])


def test_mixed_is_output_tokens_over_the_whole_time() -> None:
    assert Cell("mixed", "mixed", ((4, 1), (4, 3))).tokens_per_s([[1.0], [1.0, 1.5, 2.0]]) == 2


def test_prompts_depend_on_the_seed_and_contain_no_special_token() -> None:
    cell = decode(8)
    assert cell.prompts(64, "1 0") == cell.prompts(64, "1 0") != cell.prompts(64, "1 1")
    drawn = {token for prompt in cell.prompts(64, "1 0") for token in prompt}
    assert drawn == set(range(10, 64)) and [len(prompt) for prompt in cell.prompts(64, "")] == [480] * 8


def test_mixed_lengths_fill_their_ranges() -> None:
    lengths = mixed(5000).requests
    assert {min(column) for column in zip(*lengths, strict=True)} == {64, 32}
    assert {max(column) for column in zip(*lengths, strict=True)} == {512, 128}
    assert mixed(8).requests == mixed(32).requests[:8]


def test_the_room_fits_every_cell_with_separate_sequences() -> None:
    given = room([prefill(2048), decode(8), mixed(32)])
    assert given.sequences == 32 and given.tokens_each >= max(sum(request) for request in mixed(32).requests)
    assert given.tokens_each % 256 == 0
    alone = room([prefill(2048), decode(1)])
    assert alone.sequences == 1 and alone.tokens == CONTEXT > 2048
    assert room([decode(2)]).tokens >= CONTEXT, "a cell of few short requests leaves room for the longest one"


def test_same_tokens_compares_position_by_position() -> None:
    assert same_tokens([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == (3, 4)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        same_tokens([[1]], [[1, 2]])


# Model and ceilings


def test_parameters_follow_from_the_shape() -> None:
    attention, mlp = 8 * 8 + 8 * 8 + 2 * 8 * 4, 3 * 8 * 24  # q, o, k and v; gate, up, down
    assert MODEL.layer_parameters == 2 * (attention + mlp)
    assert MODEL.read_parameters == MODEL.layer_parameters + 32 * 8
    assert MODEL.parameters == MODEL.read_parameters + 32 * 8
    assert MODEL.kv_numbers == 2 * 2 * 1 * 4


def test_prefill_flops_count_weights_head_and_causal_attention() -> None:
    pairs = 1 + 2 + 3  # pairs of a query and a key that it sees
    assert MODEL.prefill_flops(3) == 2 * MODEL.layer_parameters * 3 + 2 * 32 * 8 + 2 * pairs * (2 * 8 + 2 * 8)


def test_the_memory_ceiling_is_bandwidth_over_the_bytes_of_the_weights() -> None:
    wide, narrow = (Engine("x", kind, "x") for kind in ("float32", "bfloat16"))
    assert roof(CEILINGS, MODEL, wide, "decode b1") == 10e9 / (MODEL.read_parameters * 4)
    assert roof(CEILINGS, MODEL, narrow, "decode b1") == 10e9 / (MODEL.read_parameters * 2)
    assert roof(CEILINGS, MODEL, replace(narrow, precision="int8", bits=8.5), "decode b1") == 10e9 / (MODEL.read_parameters * 8.5 / 8)
    assert roof(CEILINGS, MODEL, wide, "decode b8") is None and roof(CEILINGS, MODEL, wide, "mixed") is None


def test_the_compute_ceiling_depends_on_the_precision() -> None:
    wide, narrow, eight = (Engine("x", kind, "x") for kind in ("float32", "bfloat16", "int8"))
    expected = 100e9 * 3 / MODEL.prefill_flops(3)
    assert roof(CEILINGS, MODEL, wide, "prefill 3") == pytest.approx(expected)
    assert roof(CEILINGS, MODEL, narrow, "prefill 3") == roof(CEILINGS, MODEL, eight, "prefill 3") == pytest.approx(2 * expected)


# Report


def test_a_ratio_is_the_median_over_paired_repeats() -> None:
    assert ratio({0: 10.0, 1: 30.0, 2: 8.0}, {0: 5.0, 1: 10.0, 2: 8.0}) == 2
    assert ratio({0: 10.0, 1: 9.0}, {1: 3.0, 2: 1.0}) == 3, "only repeats that both have count"
    assert ratio({0: 1.0}, {}) is None


def samples() -> list[Samples]:
    ours, fast, slow, other = (
        Engine(name, kind, "x") for name, kind in ((OURS, "float32"), ("fast", "float32"), ("slow", "float32"), ("quick", "int8"))
    )
    cell = "decode b1"
    return [
        Samples(ours, {cell: {0: 90.0, 1: 110.0, 2: 100.0}}, [1.0, 3.0], 64 << 20, 40 << 20, (9, 10)),
        Samples(fast, {cell: {0: 80.0, 1: 80.0, 2: 80.0}}, [1.0], 64 << 20, 64 << 20),
        Samples(slow, {cell: {0: 10.0, 1: 10.0, 2: 10.0}}, [1.0], 64 << 20, 64 << 20),
        Samples(other, {cell: {0: 500.0}}, [1.0], 64 << 20, 64 << 20),
        Samples(REFERENCE, {cell: {0: 20.0, 1: 20.0, 2: 20.0}}, [1.0], 64 << 20, 64 << 20),
    ]


def test_the_best_peer_has_the_same_precision_and_is_not_baton() -> None:
    best = best_peer(samples(), "float32", "decode b1")
    assert best is not None and best.engine.name == "fast"
    assert best_peer(samples(), "bfloat16", "decode b1") is None


def test_a_row_contains_spread_ratios_and_share() -> None:
    row = summary(samples(), CEILINGS, MODEL)[0]
    cell = row["cells"]["decode b1"]
    assert (cell["tokens_per_s"], cell["spread"], cell["to_transformers"], cell["best_peer"], cell["to_best_peer"]) == (
        100,
        10,
        5,
        "fast",
        1.25,
    )
    assert cell["share_of_ceiling"] == pytest.approx(100 * MODEL.read_parameters * 4 / 10e9)
    assert (row["peak_rss_mib"], row["same_tokens"], row["start_s"]["median"], row["start_s"]["spread"]) == (64, 0.9, 2, 1)


def test_the_table_shows_rates_ratios_and_shares() -> None:
    text = table(summary(samples(), CEILINGS, MODEL), ["decode b1", "mixed"])
    assert "100 ±10 (5.00x)" in text and "1.25x fast" in text and "90.0%" in text and " 1.6 " in text
    assert text.index("== float32") < text.index("== int8") and "500 ±0 (25.00x)" in text


def test_the_table_judges_every_arm_of_ours() -> None:
    rates = {OURS: 50.0, f"{OURS} f32-act": 40.0, "p": 25.0}
    arms = [Samples(Engine(name, "int8", "x"), {"mixed": {0: rate}}, [1.0], 1, 1) for name, rate in rates.items()]
    lines = [line.split() for line in table(summary(arms, CEILINGS, MODEL), ["mixed"]).splitlines() if "÷ peer" in line]
    assert lines == [[OURS, "÷", "peer", "2.00x", "p"], [OURS, "f32-act", "÷", "peer", "1.60x", "p"]]


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "peers.png"
    picture(summary(samples(), CEILINGS, MODEL), {"tiny": "1 k parameters"}, ["prefill 3", "decode b1"], file, "here")
    height, width = imread(file).shape[:2]
    assert width > height > 100


# Engines


def test_labels_are_unique_and_the_reference_is_listed() -> None:
    assert len({engine.label for engine in ENGINES}) == len(ENGINES) and REFERENCE in ENGINES
    assert {engine.precision for engine in ENGINES if engine.name == OURS} == set(NUMERIC_TYPES)


def test_the_memory_for_kv_depends_on_its_type() -> None:
    space = Room(2, 256)
    kv = {engine.precision: engine.message(Path("m"), MODEL, space, 2)["kv_bytes"] for engine in ENGINES if engine.name == OURS}
    assert kv["float32"] == 2 * kv["bfloat16"] == 2 * 256 * MODEL.kv_numbers * 4


# Processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    def make(program: str) -> Driver:
        driver = Driver([sys.executable, "-c", program], {"WORD": "heard"}, tmp_path / "logs" / "log")
        started.append(driver)
        return driver

    yield make
    for driver in started:
        driver.end()


ECHO = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps({"said": json.loads(line), "word": os.environ["WORD"], "pid": os.getpid()}), flush=True)
"""


def state(pid: int) -> str:
    """The state letter of proc(5): T is stopped, Z is a zombie; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_driver_answers_line_by_line(start: Callable[[str], Driver]) -> None:
    driver = start(ECHO)
    for said in ({"a": 1}, {"b": "x" * 300_000}):
        answer = driver.ask(said, 20)
        assert answer["said"] == said and answer["word"] == "heard"
    assert driver.peak_rss() > 1 << 20


def test_an_error_is_raised_and_the_driver_keeps_running(start: Callable[[str], Driver]) -> None:
    driver = start("""
import sys
for line in sys.stdin:
    print('{"error": "too hot"}' if "x" in line else '{}', flush=True)
""")
    with pytest.raises(DriverError, match="too hot"):
        driver.ask({"x": 1}, 20)
    assert driver.ask({}, 20) == {}


def test_a_missed_deadline_ends_the_driver_and_its_children(start: Callable[[str], Driver]) -> None:
    driver = start("""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
sys.stdin.readline()
print('{"pid": %d}' % child.pid, flush=True)
time.sleep(600)
""")
    child = driver.ask({}, 20)["pid"]
    assert state(child) not in "XZ"
    began = time.monotonic()
    with pytest.raises(DriverError, match=r"no answer in 0 s"):
        driver.ask({}, 0.3)
    assert time.monotonic() - began < 20
    wait(lambda: state(child) in "XZ")


def test_the_error_for_a_dead_driver_contains_its_last_words(start: Callable[[str], Driver]) -> None:
    driver = start("raise SystemExit('no such model')")
    with pytest.raises(DriverError, match="died: no such model"):
        driver.ask({}, 20)
    with pytest.raises(DriverError, match="died"):
        driver.ask({}, 20)


def test_an_engine_sleeps_until_its_turn(start: Callable[[str], Driver]) -> None:
    driver = start(ECHO)
    pid = driver.ask({}, 20)["pid"]
    driver.sleep()
    wait(lambda: state(pid) == "T")
    with driver.awake():
        assert driver.ask({"again": 1}, 20)["said"] == {"again": 1} and state(pid) != "T"
    wait(lambda: state(pid) == "T")
