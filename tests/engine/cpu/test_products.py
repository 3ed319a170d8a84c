"""What multiplies weights is what was fastest here, the same in every process, or what the switch says."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.agreed import agreeing
from baton.engine.cpu import compiled_ops, int8, panels, products
from baton.engine.cpu.compiled_ops import CompiledOps
from baton.engine.cpu.kernel_cache import Place
from baton.engine.cpu.products import CANDIDATES, ROWS, ProductChoice, decide, measured
from baton.engine.model import onednn
from baton.engine.model.ops import Multiply

KINDS = [torch.float32, torch.bfloat16, torch.int8]


def busy(share: float) -> Callable[[], tuple[float, float]]:
    """Clocks of a process whose threads are on a core for this share of the time."""
    return lambda: ((now := time.perf_counter()), now * share * torch.get_num_threads())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(products, "place_of", lambda file: Place(tmp_path, tmp_path / "x.py", "all"))
    monkeypatch.setattr(products, "_clocks", busy(0.9))
    products.choice.cache_clear()
    yield tmp_path
    products.choice.cache_clear()


def kept(folder: Path) -> list[Path]:
    return list(folder.glob("products-*.json"))


def plain(x: Tensor) -> Tensor:
    return x


def slow(x: Tensor) -> Tensor:
    time.sleep(0.002)
    return x


@dataclass
class Arms:
    """Of which one takes the least time by far."""

    fast: str
    tried: list[str] = field(default_factory=list)

    def __call__(self, name: str, matrix: Tensor) -> Multiply:
        if name == "torch":
            raise ValueError("cannot")
        self.tried.append(name)
        return plain if name == self.fast else slow

    def __hash__(self) -> int:
        return id(self)

    def choice(self, threads: int = 2) -> ProductChoice:
        """As a new process finds it."""
        products.choice.cache_clear()
        return products.choice(torch.float32, threads, self)


@pytest.mark.parametrize(
    ("seconds", "by"),
    [
        ({"baton": [1.0, 1.0, 1.0]}, "baton"),
        ({"baton": [1.0, 1.0, 1.0], "onednn": [0.95, 0.95, 0.95]}, "baton"),  # not by a tenth
        ({"baton": [1.0, 1.0, 1.0], "onednn": [0.9, 0.9, 0.9]}, "onednn"),
        ({"baton": [1.0, 1.0, 1.0], "onednn": [1.2, 1.2, 0.5], "torch": [0.8, 0.8, 0.8]}, "torch"),
        ({"baton": [1.0, 1.0, 5.0], "onednn": [1.4, 1.4, 1.0]}, "onednn"),  # instructions for whole tiles
        ({"baton": [1.0, 1.4, 1.0], "onednn": [1.4, 1.0, 1.0]}, "baton"),
        ({"baton": [6.0], "onednn": [1.0, 1.0, 1.0], "torch": [0.1, 9.0]}, "onednn"),  # the others were given up
        ({"baton": [6.0], "onednn": [1.0, 1.0, 1.0], "torch": [0.95, 0.95, 0.95]}, "onednn"),
    ],
)
def test_the_fastest_is_chosen_and_the_first_of_equals(seconds: dict[str, list[float]], by: str) -> None:
    assert decide(seconds) == by


def test_a_hopeless_arm_is_given_up() -> None:
    found = measured({"slow": slow, "fast": plain}, torch.float32)
    assert len(found["slow"]) == 1 and len(found["fast"]) == len(ROWS)


def test_a_choice_is_kept_for_later_processes(folder: Path) -> None:
    arms, others = Arms("onednn"), Arms("baton")
    first = arms.choice()
    assert first.by == "onednn" and arms.tried == ["baton", "onednn"]  # torch cannot
    assert others.choice() == first and not others.tried
    assert others.choice(threads=3).by == "baton"  # as many threads were not tried before
    assert len(kept(folder)) == 2 and all(file.stat().st_mode & 0o444 == 0o444 for file in kept(folder))


def test_what_was_decided_on_a_busy_processor_holds_for_later_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that starts again on a quiet one must not multiply otherwise than the others."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "_clocks", busy(0.6))
        assert Arms("onednn").choice().by == "baton"
        assert "disturbed" in caplog.text
    later = Arms("onednn").choice()
    assert later.by == "baton" and str(later) == "baton (not compared with others)"
    kept(folder)[0].unlink()
    assert Arms("onednn").choice().by == "onednn"


@dataclass
class Cluster:
    """What it says to every question, and what it was asked and told."""

    says: Callable[[str], str]
    heard: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, topic: str, mine: str) -> str:
        self.heard.append((topic, mine))
        return self.says(mine)


@pytest.mark.parametrize(("held", "by", "tried"), [("onednn", "onednn", False), ("torch", "baton", True), ("an abacus", "baton", True)])
def test_what_a_cluster_has_agreed_on_is_not_tried_unless_it_cannot_be_done(folder: Path, held: str, by: str, tried: bool) -> None:
    """It is not kept here: another cluster may have found something else."""
    cluster = Cluster(lambda mine: held)
    with agreeing(cluster):
        assert Arms("baton").choice().by == by
    assert bool(kept(folder)) == tried
    ((topic, mine),) = cluster.heard
    assert not mine and topic.startswith("products of torch.float32")


def test_what_was_found_is_told_and_gives_way_to_what_another_told_first(folder: Path) -> None:
    first, late = Cluster(lambda mine: mine), Cluster(lambda mine: mine and "baton")
    with agreeing(first):
        assert Arms("onednn").choice().by == "onednn"
    with agreeing(late):
        assert Arms("onednn").choice().by == "baton"
    assert [mine for _, mine in first.heard] == ["", "onednn"] == [mine for _, mine in late.heard]
    assert Arms("torch").choice().by == "onednn", "what was found here is kept"


def test_a_trial_that_was_disturbed_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, shares = products._try, iter([0.6, 0.6, 0.9])
    monkeypatch.setattr(products, "_try", lambda kind, arms: (real(kind, arms)[0], next(shares)))
    assert Arms("onednn").choice().by == "onednn"


@pytest.mark.parametrize("text", ["", "[1]", '{"by": "onednn"}', '{"by": "abacus", "seconds": {}}', '{"by": [], "seconds": 7}'])
def test_a_file_that_says_nothing_is_replaced(folder: Path, text: str) -> None:
    Arms("onednn").choice()
    (file,) = kept(folder)
    file.write_text(text)
    again = Arms("baton")
    assert again.choice().by == "baton" and again.tried
    assert Arms("onednn").choice().by == "baton"


def test_a_process_that_starts_while_another_tries_waits_for_what_it_finds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, theirs = Arms("baton"), ProductChoice("onednn", {"onednn": [1.0] * 3})
    file = folder / f"products-{products._machine(torch.float32, 2):08x}.json"
    monkeypatch.setattr(products, "_try", lambda kind, arms: pytest.fail("tried"))
    with ThreadPoolExecutor() as pool:
        with products._alone(folder / "products.lock"):
            found = pool.submit(late.choice)
            while not late.tried:  # it has looked for the file
                time.sleep(0.001)
            products._keep(file, theirs, theirs)
        assert found.result() == theirs


def test_where_nothing_can_be_kept_nothing_is_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every process would find something for itself."""
    for place in (None, Place(folder / "gone", folder / "gone" / "x.py", "all")):
        monkeypatch.setattr(products, "place_of", lambda file, place=place: place)
        assert Arms("onednn").choice().by == "baton"
    assert "no place" in caplog.text and "cannot be kept" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_this_processor_is_tried(folder: Path, kind: torch.dtype) -> None:
    found = compiled_ops.choice(kind)
    assert found.by in CANDIDATES and len(found.seconds[found.by]) == len(ROWS)
    assert "baton" in found.seconds and all(taken > 0 for times in found.seconds.values() for taken in times)
    assert str(found).startswith(found.by)


def matrix_of(kind: torch.dtype) -> Tensor:
    matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    return matrix.mul(40).round().clamp(-127, 127).to(kind) if kind == torch.int8 else matrix.to(kind)


def product(ops: CompiledOps, matrix: Tensor, x: Tensor) -> Tensor:
    if matrix.dtype == torch.int8:
        return ops.int8_multiplier(matrix, torch.ones(len(matrix)), None)(x)
    return ops.multiplier(matrix, None)(x)


def noted(function: Callable[..., Multiply], whose: str, called: list[str]) -> Callable[..., Multiply]:
    def call(*given: Tensor | None) -> Multiply:
        called.append(whose)
        return function(*given)

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", CANDIDATES)
def test_the_switch_and_the_choice_say_who_multiplies(by: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == torch.int8 and by != "baton" and not onednn.multiplies_int8():
        pytest.skip("no VNNI")
    if by == "onednn" and kind != torch.int8 and not onednn.multiplies(kind):
        pytest.skip("oneDNN multiplies no such numbers on this processor")
    called: list[str] = []
    monkeypatch.setattr(compiled_ops, "choice", lambda kind: ProductChoice(by, {by: [1.0] * len(ROWS)}))
    for module, whose in ((panels, "baton"), (int8, "baton"), (onednn, "onednn")):
        for name in ("multiplier", "int8_multiplier", "packed", "packed_int8"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, noted(getattr(module, name), whose, called))
    matrix = matrix_of(kind)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16 if kind == torch.bfloat16 else torch.float32)
    exact = F.linear(x.double(), matrix.double())
    for asked in (by, "auto"):
        called.clear()
        ops = CompiledOps(asked)
        error = (product(ops, matrix, x).double() - exact).abs().max() / exact.abs().max()
        assert error < 0.02
        assert called == ([] if by == "torch" else [by]) and ops.recurring == (by != "baton")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_matrix_that_does_not_fit_is_left_to_others(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "fits", lambda matrix: False)
    ops = CompiledOps("baton")
    assert ops.multiplier(torch.ones(3, 5, dtype=kind), None)(torch.ones(2, 5, dtype=kind)).tolist() == [[5.0] * 3] * 2
    assert ops.recurring
