"""A worker's GPU metrics, at the boundary of NVML."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, FakeSlice, NVMLError

from baton.cluster import gpu_watch
from baton.cluster.gpu_watch import AGE, FACTS, GpuWatch
from baton.cluster.metrics import Book
from baton.cluster.records import GpuRecord
from baton.worker.meter import Meter

WITHIN_S = 60.0
NONE = SimpleNamespace(reachable=True, reconnects=0, exported=0, dropped=0)


class Nvml(FakeNvml):
    """Also what the watch asks. `blocked`: the driver hangs; `lost`: it answers with an error."""

    blocked: threading.Event | None = None
    asked: int = 0
    lost: bool = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeSlice:
        self.asked += 1
        if self.blocked:
            self.blocked.wait(WITHIN_S)
        if self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        every: list[FakeGpu | FakeSlice] = [*self.gpus, *(part for gpu in self.gpus for part in gpu.slices)]
        return next(device for device in every if device.uuid == uuid)

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> SimpleNamespace:
        if isinstance(device, FakeSlice):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:
        return 350_500

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int) -> int:
        assert counter == 0
        return (7, 2)[kind]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def scrape(book: Book) -> dict[str, dict[tuple[str, ...], float]]:
    """The GPU metrics by the values of their own labels."""
    return {
        family.name: {tuple(v for k, v in series.labels.items() if k not in ("worker", "role")): series.value for series in family.series}
        for family in book.families()
        if family.name.startswith("baton_gpu")
    }


@pytest.fixture
def watched() -> Iterator[Callable[..., tuple[Book, GpuWatch]]]:
    watches: list[GpuWatch] = []

    def make(nvml: FakeNvml, **env: str) -> tuple[Book, GpuWatch]:
        book, watch = Book("decode", "decode-0"), GpuWatch(env, nvml, 0.01)
        member: Any = NONE
        Meter(book, member, member).watch(watch)
        watches.append(watch)
        watch.start()
        return book, watch

    yield make
    for watch in watches:
        watch.stop()


Make = Callable[..., tuple[Book, GpuWatch]]


def test_the_numbers_are_those_of_the_gpus_that_the_worker_was_given(watched: Make) -> None:
    book, watch = watched(Nvml([FakeGpu("GPU-a"), FakeGpu("GPU-b", used=3 * GIB)]), CUDA_VISIBLE_DEVICES="GPU-b")
    until(watch.age)
    told = scrape(book)
    assert told.pop(AGE)[()] < WITHIN_S
    assert told == {
        "baton_gpu_memory_bytes": {("1", "used"): 3 * GIB, ("1", "free"): 77 * GIB},
        "baton_gpu_busy_ratio": {("1",): 0.0},
        "baton_gpu_power_watts": {("1",): 350.5},
        "baton_gpu_ecc_errors_total": {("1", "corrected"): 7, ("1", "uncorrected"): 2},
    }


def test_what_a_device_does_not_tell_is_not_there(watched: Make) -> None:
    """A slice, whose use is not told."""
    book, watch = watched(Nvml([FakeGpu("GPU-a", mig=True, slices=[FakeSlice("MIG-x")])]))
    until(watch.age)
    told = scrape(book)
    assert "baton_gpu_busy_ratio" not in told and told["baton_gpu_memory_bytes"][("MIG-x", "free")] == 20 * GIB


def test_a_workers_record_has_them_until_the_driver_is_silent(watched: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch = watched(Nvml([FakeGpu("GPU-a", used=3 * GIB), FakeGpu("GPU-b", mig=True, slices=[FakeSlice("MIG-x")])]))
    until(watch.age)
    assert watch.records() == (
        GpuRecord("0", "NVIDIA H100 80GB HBM3", 3 * GIB, 80 * GIB, 0.0, 350.5, 7, 2),
        GpuRecord("MIG-x", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 0, 20 * GIB, None, 350.5, 7, 2),
    )
    monkeypatch.setattr(gpu_watch, "STALE_S", -1.0)
    assert watch.records() == ()


@pytest.mark.parametrize("nvml", [Nvml([]), Nvml(fails=9)], ids=["no GPU", "no driver"])
def test_without_a_gpu_there_is_no_metric(watched: Make, nvml: FakeNvml) -> None:
    book, watch = watched(nvml)
    until(lambda: not any(thread.name == "gpu watch" for thread in threading.enumerate()))
    assert scrape(book) == {} and watch.records() == ()


def test_a_driver_that_hangs_holds_up_no_scrape_and_the_last_numbers_grow_old(watched: Make) -> None:
    nvml = Nvml([FakeGpu("GPU-a")])
    book, watch = watched(nvml)
    until(watch.age)
    nvml.blocked = threading.Event()
    asked = nvml.asked
    until(lambda: nvml.asked > asked)  # the thread hangs now
    before = scrape(book)
    until(lambda: scrape(book)[AGE][()] > before[AGE][()] + 0.1)
    assert scrape(book)["baton_gpu_memory_bytes"] == before["baton_gpu_memory_bytes"]
    watch.stop()
    nvml.blocked.set()


def test_a_gpu_that_is_lost_is_said_once_in_a_while_and_comes_back(watched: Make, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml([FakeGpu("GPU-a")])
    _, watch = watched(nvml)
    until(watch.age)
    nvml.lost = True
    until(lambda: "no news of the GPUs: the GPU does not answer any more" in caplog.text)
    nvml.lost = False
    asked = nvml.asked
    until(lambda: nvml.asked > asked + 2)
    assert watch.age()[()] < WITHIN_S


def test_every_fact_is_in_the_table_of_a_worker_alone() -> None:
    book = Book("prefill", "prefill-0")
    for fact in FACTS:
        book.read(fact.name, dict)
        with pytest.raises(KeyError):
            Book("router").read(fact.name, dict)
